//! One client: makes request after request, behaves as drawn, judges what comes.

use super::faults;
use super::judge::{self, Outcome, Promise, StreamJudge};
use super::ledger::Ledger;
use super::mix::{self, Errand, KINDS, Manner};
use super::pace::Pace;
use super::target::Target;
use super::wire::{Connection, Head, request};
use crate::random::Random;
use serde_json::{Value, json};
use std::io::{self, BufRead, BufReader, Read};
use std::time::Duration;

/// Kinds of the report beside [`KINDS`].
const BAD_REQUEST: &str = "bad request";
const FIXED_PROMPT: &str = "fixed greedy prompt";
/// Share of requests that are bad, and that are the fixed greedy one, in percent.
const BAD_PERCENT: u64 = 14;
const FIXED_PERCENT: u64 = 4;
/// Share of requests that use the connection of the one before.
const KEEP_PERCENT: u64 = 70;
/// Longest pause after a refusal: the load stays on, but clients do not spin.
const REFUSED_PAUSE_MS: u64 = 200;

/// What all clients share.
pub(super) struct Load<'a> {
    pub(super) target: &'a Target,
    pub(super) pace: &'a Pace,
    pub(super) ledger: &'a Ledger,
    /// Which of [`KINDS`] the server answers.
    pub(super) supported: [bool; KINDS.len()],
    /// The greedy answer that must always come.
    pub(super) greedy: &'a str,
}

/// A client.
pub(super) struct Visitor<'a> {
    load: &'a Load<'a>,
    random: Random,
    connection: Option<Connection>,
}

impl<'a> Visitor<'a> {
    pub(super) fn new(load: &'a Load<'a>, seed: u64) -> Self {
        Self { load, random: Random::new(seed), connection: None }
    }

    /// Makes requests until the end.
    pub(super) fn run(&mut self, client: usize) {
        while let Some(mode) = self.load.pace.turn(client, || self.connection = None) {
            if self.random.percent(FIXED_PERCENT) {
                self.fixed_prompt();
            } else if self.random.percent(BAD_PERCENT) {
                self.bad_request();
            } else {
                let errand = mix::draw(&mut self.random, mode, self.load.target.card.context_max, &self.load.supported);
                self.good_request(&errand);
            }
        }
    }

    fn good_request(&mut self, errand: &Errand) {
        let kind = KINDS[errand.kind].0;
        match self.visit(errand) {
            Ok(Ok(outcome)) => {
                let refused = matches!(outcome, Outcome::Refused { .. });
                self.load.ledger.outcome(kind, outcome.label());
                if refused {
                    std::thread::sleep(Duration::from_millis(self.random.below(REFUSED_PAUSE_MS)));
                }
            }
            Ok(Err(broken)) => self.broken(format!("{kind}: {broken}; request {}", brief(errand))),
            Err(error) => self.broken(format!("{kind}: no answer ({error}); request {}", brief(errand))),
        }
    }

    fn broken(&mut self, what: String) {
        self.connection = None;
        self.load.ledger.broken(what);
    }

    /// Makes a request. The outer error is the connection's: nothing may break it but a client that leaves.
    fn visit(&mut self, errand: &Errand) -> io::Result<Result<Outcome, String>> {
        let bytes = self.bytes(errand);
        let mut connection = self.connect()?;
        if let Manner::LeavesWhileSending(part) = errand.manner {
            connection.send(&bytes[..bytes.len() * part as usize / 1000])?;
            return Ok(Ok(Outcome::Left));
        }
        connection.send(&bytes)?;
        match errand.manner {
            Manner::LeavesAfter(time) => {
                std::thread::sleep(time);
                return Ok(Ok(Outcome::Left));
            }
            Manner::HalfCloses(time) => {
                std::thread::sleep(time);
                let _ = connection.half_close();
                // Such a client counts as gone: whatever comes, but soon.
                return match connection.answer() {
                    Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => Err(error),
                    _ => Ok(Ok(Outcome::Left)),
                };
            }
            Manner::Aborts(time) => {
                std::thread::sleep(time);
                if let Err(broken) = self.abort(errand)? {
                    return Ok(Err(broken));
                }
            }
            Manner::Patient | Manner::Slow | Manner::LeavesInStream(_) | Manner::LeavesWhileSending(_) => {}
        }
        let head = connection.head()?;
        let outcome = read_answer(&mut connection, &head, errand)?;
        if !head.closes() && outcome != Ok(Outcome::Left) {
            self.connection = Some(connection);
        }
        Ok(outcome)
    }

    fn bytes(&mut self, errand: &Errand) -> Vec<u8> {
        let bearer = self.bearer();
        let mut headers = vec![("Content-Type", "application/json"), ("Authorization", bearer.as_str())];
        headers.extend(errand.headers.iter().map(|(name, value)| (*name, value.as_str())));
        request("POST", errand.path, &headers, errand.body.to_string().as_bytes())
    }

    fn bearer(&mut self) -> String {
        let keys = &self.load.target.keys;
        let key = keys.get(self.random.below(keys.len() as u64) as usize);
        key.map_or_else(String::new, |key| format!("Bearer {key}"))
    }

    fn connect(&mut self) -> io::Result<Connection> {
        let kept = self.connection.take();
        match kept.filter(|_| self.random.percent(KEEP_PERCENT)) {
            Some(connection) => Ok(connection),
            None => Connection::open(&self.load.target.address),
        }
    }

    /// Aborts by id with every key, as only the request's own finds it.
    fn abort(&self, errand: &Errand) -> io::Result<Result<(), String>> {
        let id = errand.headers.iter().find(|(name, _)| *name == "X-Request-Id").map_or("", |(_, id)| id.as_str());
        let keys = &self.load.target.keys;
        let bearers: Vec<String> = keys.iter().map(|key| format!("Bearer {key}")).collect();
        let bearers = if bearers.is_empty() { vec![String::new()] } else { bearers };
        let mut connection = Connection::open(&self.load.target.address)?;
        for bearer in bearers {
            connection.send(&request("DELETE", &format!("/v1/requests/{id}"), &[("Authorization", &bearer)], b""))?;
            let (head, body) = connection.answer()?;
            if !matches!(head.status, 200 | 404) {
                return Ok(Err(format!("an abort is answered with {}: {}", head.status, String::from_utf8_lossy(&body))));
            }
        }
        Ok(Ok(()))
    }

    fn bad_request(&mut self) {
        let bearer = self.bearer();
        let fault = faults::draw(self.load.target, &bearer, &mut self.random);
        let connection = self.connect();
        let answer = connection.and_then(|mut connection| {
            connection.send(&fault.bytes)?;
            let (head, body) = connection.answer()?;
            Ok((connection, head, body))
        });
        match answer {
            Ok((connection, head, body)) => {
                let code = judge::error_code(&body);
                // Some faults are found only after the key's quota was looked at.
                let expected = fault.statuses.contains(&head.status) || code.as_deref() == Ok("rate_limit_exceeded");
                if !expected || !(fault.silence || code.is_ok()) {
                    let body = String::from_utf8_lossy(&body);
                    return self.broken(format!("bad request, {}: answered with {}: {body}", fault.name, head.status));
                }
                self.load.ledger.outcome(BAD_REQUEST, head.status.to_string());
                if !head.closes() && !fault.silence {
                    self.connection = Some(connection);
                }
            }
            Err(_) if fault.silence => self.load.ledger.outcome(BAD_REQUEST, "closed".to_owned()),
            Err(error) => self.broken(format!("bad request, {}: no answer ({error})", fault.name)),
        }
    }

    fn fixed_prompt(&mut self) {
        let mut errand = fixed_prompt();
        errand.body["stream"] = true.into();
        let promise = Promise { choices: 1, stream: true, ..Promise::default() };
        let mut text = String::new();
        let asked = (|| {
            let bytes = self.bytes(&errand);
            let mut connection = self.connect()?;
            connection.send(&bytes)?;
            let head = connection.head()?;
            if head.status != 200 {
                return read_answer(&mut connection, &head, &errand);
            }
            let outcome = read_stream(&mut connection, &head, &promise, Manner::Patient, |judge| text = judge.text().to_owned())?;
            self.connection = Some(connection);
            Ok(outcome)
        })();
        match asked {
            Ok(Ok(Outcome::Finished)) if text == self.load.greedy => self.load.ledger.outcome(FIXED_PROMPT, "same text".to_owned()),
            Ok(Ok(Outcome::Finished)) if self.load.target.card.invariant => {
                self.broken(format!("{FIXED_PROMPT}: {text:?} instead of {:?}", self.load.greedy));
            }
            Ok(Ok(Outcome::Finished)) => self.load.ledger.outcome(FIXED_PROMPT, "other text".to_owned()),
            Ok(Ok(outcome)) => self.load.ledger.outcome(FIXED_PROMPT, outcome.label()),
            Ok(Err(broken)) => self.broken(format!("{FIXED_PROMPT}: {broken}")),
            Err(error) => self.broken(format!("{FIXED_PROMPT}: no answer ({error})")),
        }
    }
}

/// A request whose answer must always be the same.
fn fixed_prompt() -> Errand {
    let body = json!({ "prompt": "Once upon a time there was a river that", "max_tokens": 32, "temperature": 0, "ignore_eos": true });
    let promise = Promise { choices: 1, ..Promise::default() };
    Errand { kind: 1, path: "/v1/completions", body, headers: Vec::new(), promise: Some(promise), manner: Manner::Patient }
}

/// The answer to the fixed greedy prompt of a server without load.
///
/// # Errors
/// If there is none.
pub(super) fn ask_fixed_prompt(target: &Target) -> anyhow::Result<String> {
    let (head, body) = ask(target, &fixed_prompt())?;
    let value: Value = serde_json::from_slice(&body)?;
    let text = value["choices"][0]["text"].as_str().map(str::to_owned);
    text.ok_or_else(|| anyhow::anyhow!("the fixed prompt is answered with {}: {value}", head.status))
}

/// Which of [`KINDS`] a server answers, by asking each a few times; 400 is no.
///
/// # Errors
/// If the server does not answer, or answers otherwise.
pub(super) fn supported_kinds(target: &Target) -> anyhow::Result<[bool; KINDS.len()]> {
    let mut supported = [true; KINDS.len()];
    for (kind, supported) in supported.iter_mut().enumerate() {
        let mut random = Random::new(7);
        for _ in 0..8 {
            let (head, body) = ask(target, &mix::of_kind(kind, &mut random, target.card.context_max))?;
            anyhow::ensure!(matches!(head.status, 200 | 400), "{} is answered with {}", KINDS[kind].0, head.status);
            if head.status == 400 {
                eprintln!("not in the mix: {} ({})", KINDS[kind].0, String::from_utf8_lossy(&body));
                *supported = false;
                break;
            }
        }
    }
    anyhow::ensure!(supported[1], "the server answers no completion");
    Ok(supported)
}

fn ask(target: &Target, errand: &Errand) -> anyhow::Result<(Head, Vec<u8>)> {
    let bearer = target.keys.first().map_or_else(String::new, |key| format!("Bearer {key}"));
    let mut connection = Connection::open(&target.address)?;
    let headers = [("Content-Type", "application/json"), ("Authorization", bearer.as_str())];
    connection.send(&request("POST", errand.path, &headers, errand.body.to_string().as_bytes()))?;
    Ok(connection.answer()?)
}

fn read_answer(connection: &mut Connection, head: &Head, errand: &Errand) -> io::Result<Result<Outcome, String>> {
    if let (200, Some(promise)) = (head.status, errand.promise.as_ref().filter(|promise| promise.stream)) {
        return read_stream(connection, head, promise, errand.manner, |_| {});
    }
    if errand.manner == Manner::Slow {
        std::thread::sleep(Duration::from_millis(100));
    }
    let mut body = Vec::new();
    connection.body(head).read_to_end(&mut body)?;
    Ok(match (head.status, &errand.promise) {
        (200, Some(promise)) => judge::whole(&body, promise),
        (200, None) => Ok(Outcome::Finished),
        (status, Some(promise)) => judge::refusal(status, head.get("retry-after").is_some(), &body, promise),
        (status, None) => Err(format!("status {status}: {}", String::from_utf8_lossy(&body))),
    })
}

fn read_stream(
    connection: &mut Connection,
    head: &Head,
    promise: &Promise,
    manner: Manner,
    last: impl FnOnce(&StreamJudge<'_>),
) -> io::Result<Result<Outcome, String>> {
    let mut judge = StreamJudge::new(promise);
    let mut lines = BufReader::with_capacity(1 << 12, connection.body(head));
    let (mut line, mut events, mut broken) = (String::new(), 0, None);
    loop {
        line.clear();
        if lines.read_line(&mut line)? == 0 {
            break;
        }
        let Some(data) = line.trim_end().strip_prefix("data: ") else { continue };
        if matches!(manner, Manner::LeavesInStream(after) if events >= after) {
            return Ok(Ok(Outcome::Left));
        }
        if manner == Manner::Slow && events % 4 == 0 {
            std::thread::sleep(Duration::from_millis(10));
        }
        events += 1;
        // The rest is read all the same, so that the connection stands where it should.
        broken = broken.or(judge.event(data).err());
    }
    last(&judge);
    Ok(match broken {
        Some(broken) => Err(broken),
        None => judge.end(),
    })
}

/// A request in few words, for the report.
fn brief(errand: &Errand) -> String {
    let mut text = format!("{} {:?} {}", errand.path, errand.manner, errand.body);
    if text.len() > 600 {
        let end = (0..=600).rev().find(|index| text.is_char_boundary(*index)).unwrap_or(0);
        text.truncate(end);
        text.push('…');
    }
    text
}
