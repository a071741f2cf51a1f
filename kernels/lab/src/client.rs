//! A small HTTP/1.1 client for streaming answers: no TLS, no redirects, one connection a request.
//!
//! Knows chunked transfer and server-sent events, nothing of OpenAI.

use anyhow::{Context, bail};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

/// Longest silence of a server.
const READ_TIMEOUT: Duration = Duration::from_secs(300);

/// Where requests go.
#[derive(Clone, Debug)]
pub(crate) struct Endpoint {
    /// `host:port`.
    pub(crate) address: String,
    /// Path prefix of the API, for example `/v1`.
    pub(crate) prefix: String,
    /// Bearer key.
    pub(crate) key: Option<String>,
}

impl Endpoint {
    /// Takes `http://host:port[/prefix]` apart.
    ///
    /// # Errors
    /// If the scheme is not `http`.
    pub(crate) fn parse(url: &str, key: Option<String>) -> anyhow::Result<Self> {
        let rest = url.strip_prefix("http://").with_context(|| format!("{url} is not an http:// address"))?;
        let (address, prefix) = rest.split_once('/').map_or((rest, String::new()), |(host, path)| (host, format!("/{path}")));
        let address = if address.contains(':') { address.to_owned() } else { format!("{address}:80") };
        Ok(Self { address, prefix: prefix.trim_end_matches('/').to_owned(), key })
    }

    /// Posts JSON and calls `event` with the data of every server-sent event, until the stream ends.
    ///
    /// # Errors
    /// If the connection fails, the status is not 200 (the body is in the message), or `event` fails.
    pub(crate) fn post_stream(&self, path: &str, body: &str, mut event: impl FnMut(&str) -> anyhow::Result<()>) -> anyhow::Result<()> {
        let mut reader = self.send(path, body)?;
        let head = read_head(&mut reader)?;
        if head.status != 200 {
            let mut text = String::new();
            Body::new(reader, &head).read_to_string(&mut text)?;
            bail!("status {}: {}", head.status, text.trim());
        }
        let mut line = String::new();
        let mut lines = BufReader::with_capacity(1 << 14, Body::new(reader, &head));
        loop {
            line.clear();
            if lines.read_line(&mut line)? == 0 {
                return Ok(());
            }
            if let Some(data) = line.strip_prefix("data:") {
                event(data.trim())?;
            }
        }
    }

    fn send(&self, path: &str, body: &str) -> anyhow::Result<BufReader<TcpStream>> {
        let mut stream = TcpStream::connect(&self.address).with_context(|| format!("cannot connect to {}", self.address))?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(READ_TIMEOUT))?;
        let key = self.key.as_ref().map_or(String::new(), |key| format!("Authorization: Bearer {key}\r\n"));
        let head = format!(
            "POST {}{path} HTTP/1.1\r\nHost: {}\r\nContent-Type: application/json\r\n{key}Content-Length: {}\r\nConnection: close\r\n\r\n",
            self.prefix,
            self.address,
            body.len()
        );
        stream.write_all(head.as_bytes())?;
        stream.write_all(body.as_bytes())?;
        Ok(BufReader::new(stream))
    }
}

struct Head {
    status: u16,
    chunked: bool,
    length: Option<u64>,
}

fn read_head(reader: &mut impl BufRead) -> anyhow::Result<Head> {
    let mut line = String::new();
    reader.read_line(&mut line)?;
    let status = line.split(' ').nth(1).and_then(|word| word.parse().ok()).with_context(|| format!("no HTTP status in {line:?}"))?;
    let mut head = Head { status, chunked: false, length: None };
    loop {
        line.clear();
        if reader.read_line(&mut line)? == 0 || line.trim().is_empty() {
            return Ok(head);
        }
        let lower = line.to_ascii_lowercase();
        if let Some(value) = lower.strip_prefix("content-length:") {
            head.length = value.trim().parse().ok();
        }
        head.chunked |= lower.starts_with("transfer-encoding:") && lower.contains("chunked");
    }
}

/// The body of an answer, chunks joined.
struct Body<R> {
    reader: R,
    chunked: bool,
    /// Bytes left of the chunk, or of the body.
    left: u64,
    ended: bool,
}

impl<R: BufRead> Body<R> {
    fn new(reader: R, head: &Head) -> Self {
        let left = if head.chunked { 0 } else { head.length.unwrap_or(u64::MAX) };
        Self { reader, chunked: head.chunked, left, ended: false }
    }

    /// Reads the size line of the next chunk.
    fn next_chunk(&mut self) -> std::io::Result<()> {
        let mut line = String::new();
        while line.trim().is_empty() {
            line.clear();
            if self.reader.read_line(&mut line)? == 0 {
                return Err(std::io::Error::from(std::io::ErrorKind::UnexpectedEof));
            }
        }
        let size = line.trim().split(';').next().unwrap_or_default();
        self.left = u64::from_str_radix(size, 16).map_err(|_| std::io::Error::from(std::io::ErrorKind::InvalidData))?;
        self.ended = self.left == 0;
        Ok(())
    }
}

impl<R: BufRead> Read for Body<R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        if self.chunked && self.left == 0 && !self.ended {
            self.next_chunk()?;
        }
        if self.ended || self.left == 0 {
            return Ok(0);
        }
        let wanted = buffer.len().min(usize::try_from(self.left).unwrap_or(usize::MAX));
        let count = self.reader.read(&mut buffer[..wanted])?;
        self.left -= count as u64;
        self.ended |= count == 0;
        Ok(count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_are_joined_and_the_end_is_found() {
        let raw = b"4\r\nabcd\r\n3;x=1\r\nefg\r\n0\r\n\r\n".as_slice();
        let mut text = String::new();
        Body::new(raw, &Head { status: 200, chunked: true, length: None }).read_to_string(&mut text).unwrap();
        assert_eq!(text, "abcdefg");
    }

    #[test]
    fn a_cut_stream_is_an_error() {
        let raw = b"4\r\nabcd\r\n".as_slice();
        let mut text = String::new();
        let result = Body::new(raw, &Head { status: 200, chunked: true, length: None }).read_to_string(&mut text);
        assert!(result.is_err());
    }

    #[test]
    fn addresses_are_taken_apart() {
        let endpoint = Endpoint::parse("http://localhost:8080/v1/", None).unwrap();
        assert_eq!((endpoint.address.as_str(), endpoint.prefix.as_str()), ("localhost:8080", "/v1"));
        assert!(Endpoint::parse("https://localhost", None).is_err());
    }
}
