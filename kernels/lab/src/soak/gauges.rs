//! Reads a server's `/metrics`.

use super::wire::{Connection, request};
use anyhow::{Context, ensure};
use std::collections::BTreeMap;

/// One scrape: every sample by its full name, labels included.
#[derive(Clone, Debug, Default)]
pub(super) struct Gauges(BTreeMap<String, f64>);

impl Gauges {
    fn parse(text: &str) -> Self {
        let samples = text.lines().filter(|line| !line.starts_with('#'));
        let pairs = samples.filter_map(|line| line.rsplit_once(' ').and_then(|(name, value)| Some((name.to_owned(), value.parse().ok()?))));
        Self(pairs.collect())
    }

    /// A sample; NaN if there is none, which equals nothing.
    pub(super) fn get(&self, name: &str) -> f64 {
        self.0.get(name).copied().unwrap_or(f64::NAN)
    }

    /// The upper bound of the bucket that holds `part` of what a histogram counted since `before`, in seconds.
    /// `None` without observations.
    pub(super) fn quantile_bound(&self, before: &Self, histogram: &str, part: f64) -> Option<f64> {
        let prefix = format!("{histogram}_bucket{{le=\"");
        let mut buckets: Vec<(f64, f64)> = self
            .0
            .iter()
            .filter_map(|(name, count)| {
                let bound = name.strip_prefix(&prefix)?.strip_suffix("\"}")?;
                let bound = if bound == "+Inf" { f64::INFINITY } else { bound.parse().ok()? };
                Some((bound, count - before.0.get(name).copied().unwrap_or(0.0)))
            })
            .collect();
        buckets.sort_by(|a, b| a.0.total_cmp(&b.0));
        let total = buckets.last().map(|(_, count)| *count).filter(|count| *count > 0.0)?;
        buckets.iter().find(|(_, count)| *count >= part * total).map(|(bound, _)| *bound)
    }
}

/// A connection that scrapes.
pub(super) struct Scraper {
    address: String,
    connection: Option<Connection>,
}

impl Scraper {
    pub(super) fn new(address: &str) -> Self {
        Self { address: address.to_owned(), connection: None }
    }

    /// Scrapes once.
    ///
    /// # Errors
    /// If the server does not answer.
    pub(super) fn read(&mut self) -> anyhow::Result<Gauges> {
        // The server closes what has been idle for long.
        self.try_read().or_else(|_| self.try_read())
    }

    fn try_read(&mut self) -> anyhow::Result<Gauges> {
        let mut connection = match self.connection.take() {
            Some(connection) => connection,
            None => Connection::open(&self.address).with_context(|| format!("no connection to {}", self.address))?,
        };
        connection.send(&request("GET", "/metrics", &[], b""))?;
        let (head, body) = connection.answer().context("/metrics does not answer")?;
        ensure!(head.status == 200, "/metrics answers {}", head.status);
        self.connection = Some(connection);
        Ok(Gauges::parse(std::str::from_utf8(&body)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_count_what_came_since() {
        let before = Gauges::parse("t_bucket{le=\"0.1\"} 90\nt_bucket{le=\"1\"} 100\nt_bucket{le=\"+Inf\"} 100\n");
        let after =
            Gauges::parse("# TYPE t histogram\nt_bucket{le=\"0.1\"} 91\nt_bucket{le=\"1\"} 110\nt_bucket{le=\"+Inf\"} 110\nx 3.5\n");
        assert_eq!(after.quantile_bound(&before, "t", 0.5), Some(1.0));
        assert_eq!(after.quantile_bound(&before, "t", 0.1), Some(0.1));
        assert_eq!(after.quantile_bound(&after, "t", 0.5), None);
        assert_eq!(after.get("x"), 3.5);
        assert!(after.get("y").is_nan());
    }
}
