//! Byte sizes as people write them.

/// Parses `24GiB`, `512M`, `1.5 GB`, `4096`. Decimal and binary units; a bare letter is binary.
///
/// # Errors
/// If it is no size.
pub(super) fn parse(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let split = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let factor: u64 = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "k" | "kib" => 1 << 10,
        "m" | "mib" => 1 << 20,
        "g" | "gib" => 1 << 30,
        "t" | "tib" => 1 << 40,
        "kb" => 1_000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        "tb" => 1_000_000_000_000,
        other => return Err(format!("unknown unit `{other}`; use B, KiB, MiB, GiB, KB, MB or GB")),
    };
    let number: f64 = number.parse().map_err(|_| format!("`{text}` is not a size; write for example 24GiB"))?;
    let bytes = number * factor as f64;
    if bytes.is_finite() && bytes < u64::MAX as f64 { Ok(bytes as u64) } else { Err(format!("`{text}` is too large")) }
}

/// `1.50 GiB`, `38.2 MiB`, `512 B`.
pub(super) fn human(bytes: u64) -> String {
    let units = [("GiB", 1_u64 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];
    match units.into_iter().find(|(_, unit)| bytes >= *unit) {
        Some((name, unit)) => format!("{:.2} {name}", bytes as f64 / unit as f64),
        None => format!("{bytes} B"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_people_write_them() {
        let cases = [("24GiB", 24 << 30), ("512M", 512 << 20), ("1.5 kb", 1500), ("4096", 4096), ("0", 0)];
        for (text, bytes) in cases {
            assert_eq!(parse(text), Ok(bytes), "{text}");
        }
        for text in ["", "GiB", "1.2.3M", "-1", "12 parsecs", "99999999999TiB"] {
            assert!(parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn sizes_are_printed_with_a_fitting_unit() {
        assert_eq!((human(512), human(1536), human(3 << 30)), ("512 B".into(), "1.50 KiB".into(), "3.00 GiB".into()));
    }
}
