//! HTTP to the hub: metadata of files without following redirects, contents from an offset on.

use super::HubError;
use serde::Deserialize;
use std::io::Read;
use std::time::Duration;

/// Largest JSON answer read.
const JSON_BYTES_MAX: u64 = 16 << 20;
/// Redirects followed for one file.
const REDIRECTS_MAX: u32 = 5;

/// How to reach the hub.
#[derive(Clone, Debug)]
pub struct ClientOptions {
    /// Base address, `https://huggingface.co`.
    pub endpoint: String,
    /// Access token. Sent to the endpoint only, never to where it redirects.
    pub token: Option<String>,
}

/// A connection to the hub.
#[derive(Debug)]
pub struct Client {
    agent: ureq::Agent,
    options: ClientOptions,
}

/// What the hub says of a revision.
#[derive(Debug, Deserialize)]
pub(super) struct Revision {
    /// Its commit.
    pub(super) sha: String,
    /// Its files.
    pub(super) siblings: Vec<Sibling>,
}

/// A file of a revision.
#[derive(Debug, Deserialize)]
pub(super) struct Sibling {
    /// Its name.
    pub(super) rfilename: String,
}

/// What the hub says of a file.
#[derive(Debug)]
pub(super) struct FileInfo {
    /// Hash: SHA-256 (64 digits) of large files, git's blob id (40 digits) of small ones.
    pub(super) etag: String,
    /// Length.
    pub(super) bytes: u64,
}

/// Contents from some offset on.
pub(super) struct Contents {
    /// Where they start: the offset asked for, or 0 if the server ignores ranges.
    pub(super) start: u64,
    /// The bytes.
    pub(super) reader: Box<dyn Read>,
}

type Response = ureq::http::Response<ureq::Body>;

impl Client {
    /// A client; connects on use.
    pub fn new(options: ClientOptions) -> Self {
        let config = ureq::Agent::config_builder()
            .max_redirects(0)
            .max_redirects_will_error(false)
            .http_status_as_error(false)
            .timeout_connect(Some(Duration::from_secs(30)))
            .timeout_recv_response(Some(Duration::from_secs(60)))
            .user_agent(concat!("oxide-compile/", env!("CARGO_PKG_VERSION")))
            .build();
        Self { agent: config.into(), options }
    }

    pub(super) fn revision(&self, repository: &str, revision: &str) -> Result<Revision, HubError> {
        let url = format!("{}/api/models/{repository}/revision/{revision}", self.options.endpoint);
        let response = self.get(&url, None)?;
        match response.status().as_u16() {
            200 => {}
            404 => return Err(self.not_found(&response, repository, revision)),
            status => return Err(self.refused(&url, repository, status)),
        }
        let mut body = Vec::new();
        let read = response.into_body().into_reader().take(JSON_BYTES_MAX).read_to_end(&mut body);
        read.map_err(|error| HubError::Network { url: url.clone(), problem: error.to_string() })?;
        serde_json::from_slice(&body).map_err(|error| HubError::Protocol { url, problem: error.to_string() })
    }

    pub(super) fn file_info(&self, repository: &str, commit: &str, file: &str) -> Result<FileInfo, HubError> {
        let url = self.file_url(repository, commit, file);
        let sent = self.authorised(self.agent.head(&url), &url).call();
        let response = sent.map_err(|error| HubError::Network { url: url.clone(), problem: error.to_string() })?;
        match response.status().as_u16() {
            200 | 301 | 302 | 303 | 307 | 308 => {}
            404 => return Err(self.not_found(&response, repository, commit)),
            status => return Err(self.refused(&url, repository, status)),
        }
        let header = |names: [&str; 2]| names.into_iter().find_map(|name| text(&response, name));
        let missing = |what: &str| HubError::Protocol { url: url.clone(), problem: format!("the answer has no {what}") };
        let etag = header(["x-linked-etag", "etag"]).ok_or_else(|| missing("etag"))?;
        let bytes = header(["x-linked-size", "content-length"]).and_then(|size| size.parse().ok()).ok_or_else(|| missing("size"))?;
        let etag = etag.trim_start_matches("W/").trim_matches('"').to_owned();
        if etag.is_empty() || !etag.chars().all(|c| c.is_ascii_alphanumeric() || c == '-') {
            return Err(HubError::Protocol { url, problem: format!("etag `{etag}` cannot be a file name") });
        }
        Ok(FileInfo { etag, bytes })
    }

    pub(super) fn contents(&self, repository: &str, commit: &str, file: &str, start: u64) -> Result<Contents, HubError> {
        let mut url = self.file_url(repository, commit, file);
        for _ in 0..=REDIRECTS_MAX {
            let response = self.get(&url, (start > 0).then_some(start))?;
            match response.status().as_u16() {
                200 => return Ok(Contents { start: 0, reader: Box::new(response.into_body().into_reader()) }),
                206 => return Ok(Contents { start, reader: Box::new(response.into_body().into_reader()) }),
                416 => return self.contents(repository, commit, file, 0),
                301 | 302 | 303 | 307 | 308 => {
                    let location = text(&response, "location");
                    let location =
                        location.ok_or_else(|| HubError::Protocol { url: url.clone(), problem: "a redirect leads nowhere".into() })?;
                    url = if location.starts_with('/') { format!("{}{location}", self.options.endpoint) } else { location };
                }
                status => return Err(self.refused(&url, repository, status)),
            }
        }
        Err(HubError::Protocol { url, problem: format!("more than {REDIRECTS_MAX} redirects") })
    }

    fn file_url(&self, repository: &str, commit: &str, file: &str) -> String {
        format!("{}/{repository}/resolve/{commit}/{file}", self.options.endpoint)
    }

    fn get(&self, url: &str, start: Option<u64>) -> Result<Response, HubError> {
        let mut request = self.authorised(self.agent.get(url), url);
        if let Some(start) = start {
            request = request.header("range", format!("bytes={start}-"));
        }
        request.call().map_err(|error| HubError::Network { url: url.to_owned(), problem: error.to_string() })
    }

    fn authorised<B>(&self, request: ureq::RequestBuilder<B>, url: &str) -> ureq::RequestBuilder<B> {
        let own = url.strip_prefix(&self.options.endpoint).is_some_and(|rest| rest.starts_with('/'));
        match &self.options.token {
            Some(token) if own => request.header("authorization", format!("Bearer {token}")),
            _ => request,
        }
    }

    fn not_found(&self, response: &Response, repository: &str, revision: &str) -> HubError {
        let code = text(response, "x-error-code").unwrap_or_default();
        if code == "RepoNotFound" {
            return HubError::NoRepository { endpoint: self.options.endpoint.clone(), repository: repository.to_owned() };
        }
        HubError::NoRevision { repository: repository.to_owned(), revision: revision.to_owned() }
    }

    fn refused(&self, url: &str, repository: &str, status: u16) -> HubError {
        match status {
            401 | 403 => HubError::Unauthorised { endpoint: self.options.endpoint.clone(), repository: repository.to_owned(), status },
            status => HubError::Status { url: url.to_owned(), status },
        }
    }
}

fn text(response: &Response, header: &str) -> Option<String> {
    response.headers().get(header)?.to_str().ok().map(str::to_owned)
}
