//! `pull` against a server on loopback that imitates the hub: metadata, redirects, ranges, refusals.

use crate::support::small;
use oxide_compile::hub::{Cache, Client, ClientOptions, HubError, PullReport, pull};
use sha1::Digest as _;
use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::{Arc, Mutex};

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
const REPOSITORY: &str = "test/small";

/// A hub with one repository. Large files (`.safetensors`) are served from another address, as the real one does.
struct Hub {
    address: String,
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    files: BTreeMap<String, Vec<u8>>,
    token: Option<String>,
    /// Ends the connection after so many bytes of a large file.
    cut_after: Option<usize>,
    /// Serves other bytes than promised.
    corrupt: bool,
    /// Ignores `Range`.
    no_ranges: bool,
    log: Vec<Request>,
}

#[derive(Clone, Debug)]
struct Request {
    line: String,
    range: Option<usize>,
    token: Option<String>,
}

impl Hub {
    fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = format!("http://{}", listener.local_addr().expect("an address"));
        let mut files = BTreeMap::new();
        for name in ["config.json", "tokenizer.json", "tokenizer_config.json", "README.md", "onnx/model.safetensors"] {
            files.insert(name.to_owned(), format!("{{\"file\": \"{name}\"}}").into_bytes());
        }
        files.insert("model.safetensors".to_owned(), (0..100_000_u32).flat_map(u32::to_le_bytes).collect());
        let state = Arc::new(Mutex::new(State { files, ..State::default() }));
        let (served, base) = (Arc::clone(&state), address.clone());
        // The thread ends with the process: a loopback listener of a test.
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let _ = answer(stream.expect("a connection"), &served, &base);
            }
        });
        Self { address, state }
    }

    fn set(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state.lock().expect("not poisoned"));
    }

    fn log(&self) -> Vec<Request> {
        self.state.lock().expect("not poisoned").log.clone()
    }

    fn pull(&self, cache: &Path, token: Option<&str>, revision: &str) -> Result<PullReport, HubError> {
        let mut profile = small();
        profile.source.revision = revision.to_owned();
        let client = Client::new(ClientOptions { endpoint: self.address.clone(), token: token.map(str::to_owned) });
        pull(&profile, &Cache::at(cache), &client, &mut ())
    }
}

fn read_request(stream: &TcpStream) -> std::io::Result<Request> {
    let mut lines = BufReader::new(stream).lines();
    let mut request = Request { line: lines.next().transpose()?.unwrap_or_default(), range: None, token: None };
    while let Some(line) = lines.next().transpose()?.filter(|line| !line.is_empty()) {
        let (name, value) = line.split_once(':').unwrap_or((&line, ""));
        match name.to_ascii_lowercase().as_str() {
            "range" => request.range = value.trim().strip_prefix("bytes=").and_then(|r| r.trim_end_matches('-').parse().ok()),
            "authorization" => request.token = value.trim().strip_prefix("Bearer ").map(str::to_owned),
            _ => {}
        }
    }
    Ok(request)
}

fn answer(mut stream: TcpStream, state: &Mutex<State>, base: &str) -> std::io::Result<()> {
    let request = read_request(&stream)?;
    let mut state = state.lock().expect("not poisoned");
    state.log.push(request.clone());
    let mut parts = request.line.split(' ');
    let (method, path) = (parts.next().unwrap_or_default().to_owned(), parts.next().unwrap_or_default().to_owned());
    let large = path.strip_prefix("/cdn/");
    if large.is_none() && state.token.is_some() && state.token != request.token {
        return reply(&mut stream, "401 Unauthorized", &[], b"");
    }
    if let Some(revision) = path.strip_prefix(&format!("/api/models/{REPOSITORY}/revision/")) {
        return match revision {
            "main" | COMMIT => {
                let siblings: Vec<_> = state.files.keys().map(|name| serde_json::json!({ "rfilename": name })).collect();
                reply(&mut stream, "200 OK", &[], serde_json::json!({ "sha": COMMIT, "siblings": siblings }).to_string().as_bytes())
            }
            _ => reply(&mut stream, "404 Not Found", &[("x-error-code", "RevisionNotFound")], b""),
        };
    }
    if path.starts_with("/api/") {
        return reply(&mut stream, "404 Not Found", &[("x-error-code", "RepoNotFound")], b"");
    }
    let resolve = format!("/{REPOSITORY}/resolve/{COMMIT}/");
    let name = large.or_else(|| path.strip_prefix(&resolve)).unwrap_or_default();
    let Some(bytes) = state.files.get(name).cloned() else { return reply(&mut stream, "404 Not Found", &[], b"") };
    let (etag, size) = (etag(name, &bytes), bytes.len().to_string());
    if large.is_none() && name.ends_with(".safetensors") {
        let headers = [("x-linked-etag", etag.as_str()), ("x-linked-size", &size), ("location", &format!("{base}/cdn/{name}"))];
        return reply(&mut stream, "302 Found", &headers, b"");
    }
    if method == "HEAD" {
        return write!(stream, "HTTP/1.1 200 OK\r\netag: {etag}\r\ncontent-length: {size}\r\nconnection: close\r\n\r\n");
    }
    contents(&mut stream, &mut state, &request, bytes, large.is_some())
}

fn contents(stream: &mut TcpStream, state: &mut State, request: &Request, mut bytes: Vec<u8>, large: bool) -> std::io::Result<()> {
    if state.corrupt && large {
        bytes[5] ^= 1;
    }
    let start = request.range.filter(|_| !state.no_ranges);
    let body = &bytes[start.unwrap_or(0).min(bytes.len())..];
    let status = if start.is_some() { "206 Partial Content" } else { "200 OK" };
    match state.cut_after.filter(|_| large) {
        Some(cut) => {
            write!(stream, "HTTP/1.1 {status}\r\ncontent-length: {}\r\nconnection: close\r\n\r\n", body.len())?;
            stream.write_all(&body[..cut.min(body.len())])
        }
        None => reply(stream, status, &[], body),
    }
}

fn reply(stream: &mut TcpStream, status: &str, headers: &[(&str, &str)], body: &[u8]) -> std::io::Result<()> {
    write!(stream, "HTTP/1.1 {status}\r\ncontent-length: {}\r\nconnection: close\r\n", body.len())?;
    for (name, value) in headers {
        write!(stream, "{name}: {value}\r\n")?;
    }
    stream.write_all(b"\r\n")?;
    stream.write_all(body)
}

fn etag(name: &str, bytes: &[u8]) -> String {
    let hex = |digest: &[u8]| digest.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    if name.ends_with(".safetensors") {
        return format!("\"{}\"", hex(&sha2::Sha256::digest(bytes)));
    }
    let blob = [format!("blob {}\0", bytes.len()).as_bytes(), bytes].concat();
    format!("\"{}\"", hex(&sha1::Sha1::digest(blob)))
}

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().expect("a folder")
}

fn snapshot(cache: &Path) -> std::path::PathBuf {
    cache.join("models--test--small/snapshots").join(COMMIT)
}

fn incomplete(cache: &Path) -> Option<std::path::PathBuf> {
    let blobs = fs::read_dir(cache.join("models--test--small/blobs")).expect("readable");
    blobs.filter_map(Result::ok).map(|entry| entry.path()).find(|path| path.extension().is_some_and(|ext| ext == "incomplete"))
}

#[test]
fn a_pull_fills_the_cache_and_the_compiler_finds_it() {
    let (hub, cache) = (Hub::start(), folder());
    let report = hub.pull(cache.path(), None, "main").expect("pulls");
    let names: Vec<_> = report.files.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]);
    assert_eq!(report.snapshot, snapshot(cache.path()));
    let weights = fs::read(snapshot(cache.path()).join("model.safetensors")).expect("readable");
    assert!(weights == (0..100_000_u32).flat_map(u32::to_le_bytes).collect::<Vec<u8>>());
    let found = Cache::at(cache.path()).snapshot(&small()).expect("there");
    assert_eq!(found, snapshot(cache.path()), "through refs/main");
    assert!(incomplete(cache.path()).is_none());
}

#[test]
fn a_second_pull_downloads_nothing() {
    let (hub, cache) = (Hub::start(), folder());
    hub.pull(cache.path(), None, COMMIT).expect("pulls");
    let again = hub.pull(cache.path(), None, COMMIT).expect("pulls");
    assert_eq!((again.downloaded_bytes, again.files.len()), (0, 4));
}

#[test]
fn a_broken_download_resumes_where_it_stopped() {
    let (hub, cache) = (Hub::start(), folder());
    hub.set(|state| state.cut_after = Some(150_000));
    let error = hub.pull(cache.path(), None, COMMIT).expect_err("cut");
    assert!(matches!(error, HubError::Network { .. }) && error.to_string().contains("resume"), "{error}");
    hub.set(|state| state.cut_after = None);
    let kept = fs::metadata(incomplete(cache.path()).expect("kept")).expect("there").len();
    assert!(kept > 0);
    let report = hub.pull(cache.path(), None, COMMIT).expect("pulls");
    let resumed = hub.log().into_iter().rev().find(|request| request.line.contains("/cdn/")).expect("asked");
    assert_eq!(resumed.range, Some(kept as usize));
    assert!(report.downloaded_bytes < 400_000, "{} bytes came again", report.downloaded_bytes);
}

#[test]
fn a_server_without_ranges_starts_over() {
    let (hub, cache) = (Hub::start(), folder());
    hub.set(|state| state.cut_after = Some(150_000));
    hub.pull(cache.path(), None, COMMIT).expect_err("cut");
    hub.set(|state| (state.cut_after, state.no_ranges) = (None, true));
    hub.pull(cache.path(), None, COMMIT).expect("pulls, and the contents hash right");
}

#[test]
fn contents_that_hash_wrong_are_discarded() {
    let (hub, cache) = (Hub::start(), folder());
    hub.set(|state| state.corrupt = true);
    let error = hub.pull(cache.path(), None, COMMIT).expect_err("corrupt");
    assert!(matches!(&error, HubError::Checksum { file, .. } if file == "model.safetensors"), "{error}");
    assert_eq!(error.exit_code(), 43);
    assert!(incomplete(cache.path()).is_none() && !snapshot(cache.path()).join("model.safetensors").exists());
    hub.set(|state| state.corrupt = false);
    hub.pull(cache.path(), None, COMMIT).expect("pulls");
}

#[test]
fn the_token_goes_to_the_hub() {
    let (hub, cache) = (Hub::start(), folder());
    hub.set(|state| state.token = Some("secret".to_owned()));
    for token in [None, Some("wrong")] {
        let error = hub.pull(cache.path(), token, COMMIT).expect_err("refused");
        assert_eq!(error.exit_code(), 41);
        assert!(error.to_string().contains("--token") && !error.to_string().contains("wrong"), "{error}");
    }
    hub.pull(cache.path(), Some("secret"), COMMIT).expect("pulls");
}

#[test]
fn the_token_does_not_follow_a_redirect_to_another_server() {
    let (other, cache) = (Hub::start(), folder());
    let (to, files) = (other.address.clone(), other.state.lock().expect("not poisoned").files.clone());
    let proxy = TcpListener::bind("127.0.0.1:0").expect("a port");
    let front = format!("http://{}", proxy.local_addr().expect("an address"));
    // A front that knows the same files and sends large ones to `other`.
    std::thread::spawn(move || {
        for stream in proxy.incoming() {
            let state = Mutex::new(State { files: files.clone(), ..State::default() });
            let _ = answer(stream.expect("a connection"), &state, &to);
        }
    });
    let client = Client::new(ClientOptions { endpoint: front, token: Some("secret".to_owned()) });
    let mut profile = small();
    profile.source.revision = COMMIT.to_owned();
    pull(&profile, &Cache::at(cache.path()), &client, &mut ()).expect("pulls");
    let seen = other.log();
    assert!(seen.iter().any(|request| request.line.contains("/cdn/model.safetensors")));
    assert!(seen.iter().all(|request| request.token.is_none()), "{seen:?}");
}

#[test]
fn what_the_hub_does_not_have_is_told_apart() {
    let (hub, cache) = (Hub::start(), folder());
    let error = hub.pull(cache.path(), None, "gone").expect_err("no such revision");
    assert!(matches!(&error, HubError::NoRevision { revision, .. } if revision == "gone"), "{error}");
    hub.set(|state| drop(state.files.remove("tokenizer.json")));
    let error = hub.pull(cache.path(), None, COMMIT).expect_err("no tokenizer");
    assert!(matches!(&error, HubError::NoFile { file, .. } if file == "tokenizer.json"), "{error}");
    let mut profile = small();
    profile.source.repository = "test/other".to_owned();
    let client = Client::new(ClientOptions { endpoint: hub.address.clone(), token: None });
    let error = pull(&profile, &Cache::at(cache.path()), &client, &mut ()).expect_err("no such repository");
    assert!(matches!(error, HubError::NoRepository { .. }), "{error}");
}

#[test]
fn a_full_disk_says_how_much_is_missing() {
    let (hub, cache) = (Hub::start(), folder());
    let bytes: Vec<u8> = (0..100_000_u32).flat_map(u32::to_le_bytes).collect();
    let blobs = cache.path().join("models--test--small/blobs");
    fs::create_dir_all(&blobs).expect("makes");
    let name = etag("model.safetensors", &bytes);
    std::os::unix::fs::symlink("/dev/full", blobs.join(format!("{}.incomplete", name.trim_matches('"')))).expect("links");
    let error = hub.pull(cache.path(), None, COMMIT).expect_err("full");
    assert!(matches!(error, HubError::DiskFull { needed: 400_000, .. }), "{error}");
    assert_eq!(error.exit_code(), 44);
}

#[test]
fn nobody_there_is_a_network_error() {
    let cache = folder();
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let endpoint = format!("http://{}", listener.local_addr().expect("an address"));
    drop(listener);
    let client = Client::new(ClientOptions { endpoint, token: None });
    let error = pull(&small(), &Cache::at(cache.path()), &client, &mut ()).expect_err("nobody");
    assert_eq!(error.exit_code(), 42);
}
