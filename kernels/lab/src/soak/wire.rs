//! One HTTP/1.1 connection with nothing hidden: bytes go out as given, answers are read as they come.
//!
//! Unlike [`crate::client`] it can be left at any point, be kept alive, and send what is no HTTP at all.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::Duration;

/// Longest silence of a server that has something to say; streams get comments long before.
pub(super) const SILENCE: Duration = Duration::from_secs(120);

/// An open connection.
pub(super) struct Connection {
    reader: BufReader<TcpStream>,
}

/// Status and headers of an answer.
pub(super) struct Head {
    pub(super) status: u16,
    /// Names in lower case.
    headers: Vec<(String, String)>,
}

impl Head {
    /// The first value of a header; `name` in lower case.
    pub(super) fn get(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    /// Whether the connection ends with this answer.
    pub(super) fn closes(&self) -> bool {
        self.get("connection").is_some_and(|value| value.eq_ignore_ascii_case("close"))
    }

    fn chunked(&self) -> bool {
        self.get("transfer-encoding").is_some_and(|value| value.eq_ignore_ascii_case("chunked"))
    }

    fn length(&self) -> Option<u64> {
        self.get("content-length")?.parse().ok()
    }
}

/// A request's bytes.
pub(super) fn request(method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Vec<u8> {
    let mut head = format!("{method} {path} HTTP/1.1\r\nHost: soak\r\n");
    for (name, value) in headers {
        head += &format!("{name}: {value}\r\n");
    }
    if !headers.iter().any(|(name, _)| name.eq_ignore_ascii_case("content-length")) && (!body.is_empty() || method == "POST") {
        head += &format!("Content-Length: {}\r\n", body.len());
    }
    head += "\r\n";
    let mut bytes = head.into_bytes();
    bytes.extend_from_slice(body);
    bytes
}

impl Connection {
    /// Connects.
    ///
    /// # Errors
    /// The system's.
    pub(super) fn open(address: &str) -> io::Result<Self> {
        let stream = TcpStream::connect(address)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(SILENCE))?;
        stream.set_write_timeout(Some(SILENCE))?;
        Ok(Self { reader: BufReader::with_capacity(1 << 14, stream) })
    }

    /// Sends bytes as they are.
    ///
    /// # Errors
    /// The system's.
    pub(super) fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.reader.get_mut().write_all(bytes)
    }

    /// Ends the sending side only.
    ///
    /// # Errors
    /// The system's.
    pub(super) fn half_close(&self) -> io::Result<()> {
        self.reader.get_ref().shutdown(Shutdown::Write)
    }

    /// Reads the head of the next answer.
    ///
    /// # Errors
    /// If the connection breaks or what comes is no HTTP.
    pub(super) fn head(&mut self) -> io::Result<Head> {
        let status_line = self.line()?;
        let status = status_line.strip_prefix("HTTP/1.1 ").and_then(|rest| rest.get(..3)?.parse().ok()).ok_or_else(invalid)?;
        let mut headers = Vec::new();
        loop {
            let line = self.line()?;
            if line.is_empty() {
                return Ok(Head { status, headers });
            }
            let (name, value) = line.split_once(':').ok_or_else(invalid)?;
            headers.push((name.to_ascii_lowercase(), value.trim().to_owned()));
        }
    }

    /// The body that follows `head`.
    pub(super) fn body<'a>(&'a mut self, head: &Head) -> Body<'a> {
        let framing = match (head.chunked(), head.length()) {
            (true, _) => Framing::Chunks { left: 0 },
            (false, Some(length)) => Framing::Length { left: length },
            (false, None) if head.status == 204 => Framing::Ended,
            (false, None) => Framing::Close,
        };
        Body { connection: self, framing }
    }

    /// Reads a whole answer.
    ///
    /// # Errors
    /// As [`Connection::head`], or if the body breaks off.
    pub(super) fn answer(&mut self) -> io::Result<(Head, Vec<u8>)> {
        let head = self.head()?;
        let mut bytes = Vec::new();
        self.body(&head).read_to_end(&mut bytes)?;
        Ok((head, bytes))
    }

    fn line(&mut self) -> io::Result<String> {
        let mut line = String::new();
        if self.reader.read_line(&mut line)? == 0 || !line.ends_with("\r\n") {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        line.truncate(line.len() - 2);
        Ok(line)
    }
}

fn invalid() -> io::Error {
    io::ErrorKind::InvalidData.into()
}

enum Framing {
    Length {
        left: u64,
    },
    Chunks {
        left: u64,
    },
    /// Until the connection closes.
    Close,
    Ended,
}

/// The body of an answer; at its end the connection stands before the next answer.
pub(super) struct Body<'a> {
    connection: &'a mut Connection,
    framing: Framing,
}

impl Body<'_> {
    fn next_chunk(&mut self) -> io::Result<u64> {
        let line = self.connection.line()?;
        let size = u64::from_str_radix(line.split(';').next().unwrap_or_default().trim(), 16).map_err(|_| invalid())?;
        if size == 0 {
            while !self.connection.line()?.is_empty() {}
        }
        Ok(size)
    }

    fn take(&mut self, buffer: &mut [u8], left: u64) -> io::Result<usize> {
        let wanted = buffer.len().min(usize::try_from(left).unwrap_or(usize::MAX));
        match self.connection.reader.read(&mut buffer[..wanted])? {
            0 if wanted > 0 => Err(io::ErrorKind::UnexpectedEof.into()),
            count => Ok(count),
        }
    }
}

impl Read for Body<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self.framing {
            Framing::Ended | Framing::Length { left: 0 } => Ok(0),
            Framing::Length { left } => {
                let count = self.take(buffer, left)?;
                self.framing = Framing::Length { left: left - count as u64 };
                Ok(count)
            }
            Framing::Chunks { left: 0 } => {
                let left = self.next_chunk()?;
                self.framing = if left == 0 { Framing::Ended } else { Framing::Chunks { left } };
                self.read(buffer)
            }
            Framing::Chunks { left } => {
                let count = self.take(buffer, left)?;
                let left = left - count as u64;
                if left == 0 && !self.connection.line()?.is_empty() {
                    return Err(invalid());
                }
                self.framing = Framing::Chunks { left };
                Ok(count)
            }
            Framing::Close => self.connection.reader.read(buffer),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    fn answering(bytes: &'static [u8]) -> Connection {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        std::thread::spawn(move || listener.accept().unwrap().0.write_all(bytes).unwrap());
        Connection::open(&address).unwrap()
    }

    #[test]
    fn two_answers_of_one_connection_are_told_apart() {
        let mut connection = answering(
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\nHTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\nno",
        );
        let (head, body) = connection.answer().unwrap();
        assert_eq!((head.status, &body[..]), (200, &b"abcde"[..]));
        let (head, body) = connection.answer().unwrap();
        assert_eq!((head.status, &body[..]), (404, &b"no"[..]));
        assert!(connection.answer().is_err());
    }

    #[test]
    fn a_body_that_breaks_off_is_an_error() {
        for bytes in [
            &b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n"[..],
            b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc",
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n",
        ] {
            assert!(answering(bytes).answer().is_err());
        }
    }
}
