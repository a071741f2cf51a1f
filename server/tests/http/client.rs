//! A small HTTP/1.1 client over a plain socket: what it sends and receives is exactly what is on the wire.

use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

/// Longest wait for a byte.
const PATIENCE: Duration = Duration::from_secs(60);

/// A whole response.
#[derive(Debug)]
pub(crate) struct Reply {
    pub(crate) status: u16,
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: Vec<u8>,
}

impl Reply {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        header(&self.headers, name)
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8(self.body.clone()).expect("bodies are UTF-8")
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.text()))
    }

    /// The JSON of a successful response.
    pub(crate) fn ok(&self) -> Value {
        assert_eq!(self.status, 200, "{}", self.text());
        self.json()
    }

    /// The error object of a refusal, after checking its shape.
    pub(crate) fn error(&self) -> Value {
        assert!(self.status >= 400, "{}: {}", self.status, self.text());
        let error = self.json()["error"].clone();
        assert!(error["message"].is_string() && error["type"].is_string(), "{}", self.text());
        assert!(error["code"].is_string() || error["code"].is_null());
        assert!(error["param"].is_string() || error["param"].is_null());
        error
    }

    /// Checks status and `param` of a refusal.
    pub(crate) fn refused(&self, status: u16, param: &str) {
        let error = self.error();
        assert_eq!((self.status, error["param"].as_str()), (status, Some(param)), "{error}");
    }
}

fn header<'a>(headers: &'a [(String, String)], name: &str) -> Option<&'a str> {
    headers.iter().find(|(key, _)| key.eq_ignore_ascii_case(name)).map(|(_, value)| value.as_str())
}

/// One connection.
pub(crate) struct Connection(pub(crate) BufReader<TcpStream>);

impl Connection {
    pub(crate) fn open(address: SocketAddr) -> Self {
        let stream = TcpStream::connect(address).expect("the server accepts");
        stream.set_read_timeout(Some(PATIENCE)).expect("socket option");
        stream.set_nodelay(true).expect("socket option");
        Self(BufReader::new(stream))
    }

    pub(crate) fn send(&mut self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) {
        let mut head = format!("{method} {path} HTTP/1.1\r\nhost: test\r\n");
        if !body.is_empty() || method == "POST" {
            head.push_str(&format!("content-length: {}\r\n", body.len()));
        }
        for (name, value) in headers {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        self.write(format!("{head}\r\n").as_bytes());
        self.write(body);
    }

    pub(crate) fn write(&mut self, bytes: &[u8]) {
        self.0.get_mut().write_all(bytes).expect("the server reads");
    }

    fn line(&mut self) -> Option<String> {
        let mut line = String::new();
        match self.0.read_line(&mut line) {
            Ok(0) => None,
            Ok(_) => Some(line.trim_end_matches("\r\n").to_owned()),
            Err(error) => panic!("reading from the server: {error}"),
        }
    }

    pub(crate) fn head(&mut self) -> (u16, Vec<(String, String)>) {
        let status = self.line().expect("a status line");
        let status = status.split(' ').nth(1).and_then(|code| code.parse().ok()).unwrap_or_else(|| panic!("status line {status}"));
        let mut headers = Vec::new();
        while let Some(line) = self.line().filter(|line| !line.is_empty()) {
            let (name, value) = line.split_once(": ").expect("a header");
            headers.push((name.to_owned(), value.to_owned()));
        }
        (status, headers)
    }

    pub(crate) fn reply(&mut self) -> Reply {
        let (status, headers) = self.head();
        let mut body = Vec::new();
        if header(&headers, "transfer-encoding") == Some("chunked") {
            while let Some(chunk) = self.chunk() {
                body.extend(chunk);
            }
        } else if let Some(length) = header(&headers, "content-length").and_then(|length| length.parse().ok()) {
            body = vec![0; length];
            self.0.read_exact(&mut body).expect("the whole body");
        }
        Reply { status, headers, body }
    }

    /// The next chunk of a chunked body; `None` after the last.
    pub(crate) fn chunk(&mut self) -> Option<Vec<u8>> {
        let size = usize::from_str_radix(&self.line().expect("a chunk size"), 16).expect("a hexadecimal size");
        let mut chunk = vec![0; size + 2];
        self.0.read_exact(&mut chunk).expect("the whole chunk");
        chunk.truncate(size);
        (size > 0).then_some(chunk)
    }
}

/// A part of an event stream.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Event {
    Data(Value),
    Comment,
    Done,
}

/// An event stream under way.
pub(crate) struct Events {
    connection: Connection,
    pub(crate) headers: Vec<(String, String)>,
    text: String,
}

impl Events {
    /// Reads the head of a streamed answer.
    pub(crate) fn begin(mut connection: Connection) -> Self {
        let (status, headers) = connection.head();
        assert_eq!(status, 200);
        assert_eq!(header(&headers, "content-type"), Some("text/event-stream"));
        Self { connection, headers, text: String::new() }
    }

    /// The next event; `None` at the end of the body.
    pub(crate) fn next(&mut self) -> Option<Event> {
        let end = loop {
            match self.text.find("\n\n") {
                Some(end) => break end,
                None => self.text.push_str(&String::from_utf8(self.connection.chunk()?).expect("every write is whole UTF-8")),
            }
        };
        let event: String = self.text.drain(..end + 2).collect();
        let event = event.trim_end();
        Some(match event.strip_prefix("data: ") {
            Some("[DONE]") => Event::Done,
            Some(json) => Event::Data(serde_json::from_str(json).unwrap_or_else(|error| panic!("{error}: {json}"))),
            None => {
                assert!(event.starts_with(':'), "neither data nor comment: {event}");
                Event::Comment
            }
        })
    }

    /// The next event that is no comment.
    pub(crate) fn data(&mut self) -> Event {
        loop {
            match self.next().expect("the stream goes on") {
                Event::Comment => {}
                event => return event,
            }
        }
    }

    /// Everything up to the end, comments left out; the last must be `[DONE]`.
    pub(crate) fn rest(&mut self) -> Vec<Value> {
        let mut events = Vec::new();
        loop {
            match self.data() {
                Event::Data(value) => events.push(value),
                Event::Done => break,
                Event::Comment => unreachable!("comments are left out"),
            }
        }
        assert_eq!(self.next(), None, "nothing follows [DONE]");
        events
    }
}

/// What a stream's chunks say of one choice.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Streamed {
    pub(crate) text: String,
    pub(crate) finish: Option<String>,
    pub(crate) stop_reason: Value,
}

/// Puts the chunks of a stream together, checking what every stream promises.
pub(crate) fn assemble(chunks: &[Value], choices: usize) -> Vec<Streamed> {
    let mut streamed = vec![Streamed::default(); choices];
    let mut began = vec![false; choices];
    for chunk in chunks {
        for name in ["id", "created", "model", "object"] {
            assert_eq!(chunk[name], chunks[0][name], "every chunk repeats {name}");
        }
        for choice in chunk["choices"].as_array().expect("choices") {
            let index = choice["index"].as_u64().expect("index") as usize;
            let state = &mut streamed[index];
            assert!(state.finish.is_none(), "nothing follows the finish of a choice");
            if let Some(delta) = choice.get("delta") {
                assert_eq!(delta.get("role").is_some(), !began[index], "the first delta, and only that, names the role");
                state.text.push_str(delta["content"].as_str().unwrap_or_default());
            } else {
                state.text.push_str(choice["text"].as_str().expect("text"));
            }
            began[index] = true;
            assert!(choice.as_object().expect("object").contains_key("finish_reason"));
            state.finish = choice["finish_reason"].as_str().map(str::to_owned);
            state.stop_reason = choice["stop_reason"].clone();
        }
    }
    assert!(streamed.iter().all(|choice| choice.finish.is_some()), "every choice finishes: {streamed:?}");
    streamed
}
