//! Device errors while requests run: who hears of them, what the server says afterwards, how the process ends.

use crate::client::{Connection, Event, Events};
use crate::support::*;
use oxide_testkit::{DriverCall, FakeCuda, ServerProcess};
use serde_json::json;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

/// Exit code of a device that failed while it ran.
const ENGINE: i32 = 5;
/// Tries to see what only shows between a failure and the end of the process.
const TRIES: u32 = 5;

/// What fails in a script, and the words of the message that must come of it.
const FAULTS: [(&str, &[&str]); 7] = [
    ("fail cuLaunchKernelEx 2 719", &[" s1 (kernel ", "cuLaunchKernelEx failed: CUDA_ERROR_LAUNCH_FAILED (719)"]),
    ("fail cuGraphLaunch 9 719", &["e0: replay of its graph", "cuGraphLaunch failed: CUDA_ERROR_LAUNCH_FAILED (719)"]),
    ("sticky cuEventSynchronize 12 700", &["e0: running its kernels", "cuEventSynchronize failed: CUDA_ERROR_ILLEGAL_ADDRESS (700)"]),
    ("sticky cuGraphLaunch 9 700", &["e0: replay of its graph", "CUDA_ERROR_ILLEGAL_ADDRESS (700)"]),
    ("fail cuMemcpyHtoDAsync_v2 12 719", &["e0: sending its inputs", "cuMemcpyHtoDAsync_v2 failed: CUDA_ERROR_LAUNCH_FAILED (719)"]),
    ("fail cuMemcpyDtoHAsync_v2 6 719", &["e0: fetching its outputs", "cuMemcpyDtoHAsync_v2 failed: CUDA_ERROR_LAUNCH_FAILED (719)"]),
    ("fail cuEventRecord 12 719", &["e0: fetching its outputs", "cuEventRecord failed: CUDA_ERROR_LAUNCH_FAILED (719)"]),
];

/// Steps that ended well: waits after the last that belongs to the start.
fn steps_done(calls: &[DriverCall]) -> usize {
    let first = calls.iter().position(is_launch).unwrap_or(calls.len());
    calls[first..].iter().filter(|call| call.name == "cuEventSynchronize" && call.code == 0).count()
}

#[test]
fn a_device_error_ends_generation_with_its_place_and_a_code() {
    for (script, words) in FAULTS {
        let fake = FakeCuda::new(script);
        let run = generate(&fake, 200);
        run.failed(ENGINE, &[words, &["generation failed: device failed: ", "Fake H200"]].concat());
        assert_eq!(run.out, "", "no answer comes of a failed device");
        let calls = fake.calls();
        let failed = calls.iter().position(|call| call.code != 0 && call.name != "cuFuncGetParamInfo").expect("something failed");
        assert!(!calls[failed + 1..].iter().any(is_launch), "{script}: launched after the failure");
        assert!(!calls[failed + 1..].iter().any(|call| call.name == "cuEventSynchronize" && call.code == 0), "{script}: went on");
        if !script.starts_with("sticky") {
            assert_freed(&calls);
        }
    }
}

/// A fault that strikes when the flag `struck` goes up, and the words of its message.
const STRUCK: [(&str, &[&str]); 3] = [
    ("fail cuGraphLaunch struck 719", &["e0: replay of its graph", "CUDA_ERROR_LAUNCH_FAILED (719)"]),
    ("sticky cuEventSynchronize struck 700", &["e0: running its kernels", "CUDA_ERROR_ILLEGAL_ADDRESS (700)"]),
    ("fail cuMemcpyDtoHAsync_v2 struck 719", &["e0: fetching its outputs", "CUDA_ERROR_LAUNCH_FAILED (719)"]),
];

/// Fails under a stream that has got tokens; whether some connection was told that the server is not ready.
fn fail_while_serving(script: &str, words: &[&str]) -> bool {
    // Weights and graphs wait four times, the prompt once: three tokens come, then the device is held.
    let fake = FakeCuda::new(&format!("hold cuEventSynchronize 8 held\n{script}"));
    fake.raise("held");
    let server = serve(&fake, &["--drain-seconds", "600"]);
    let mut probes: Vec<TcpStream> = (0..20).map(|_| half_asked(&server)).collect();
    let body = json!({"prompt": [1, 2, 3], "max_tokens": 1900, "temperature": 0, "ignore_eos": true, "stream": true});
    let mut stream = Events::begin(post(&server, "/v1/completions", &body));
    let Event::Data(first) = stream.data() else { panic!("a token comes first") };
    wait("held", || count(&fake.calls(), "held") > 0);
    fake.raise("struck");
    fake.lower("held");
    let events = [vec![first], stream.rest()].concat();
    let (last, tokens) = events.split_last().expect("an error at least");
    let message = last["error"]["message"].as_str().unwrap_or_else(|| panic!("{last} is no error"));
    assert_eq!(last["error"]["code"], "engine_failed");
    assert!(words.iter().all(|word| message.contains(word)), "{message}");
    assert!(tokens.iter().all(|event| event["error"].is_null() && event["choices"][0]["finish_reason"].is_null()), "{events:?}");
    let seen = sees_unready(&mut probes);
    drop(probes);
    assert_eq!(server.wait().code(), Some(ENGINE));
    let calls = fake.calls();
    let texts = tokens.iter().filter(|event| event["choices"][0]["text"] != json!("")).count();
    assert!((1..=steps_done(&calls)).contains(&texts), "{texts} tokens of {} steps", steps_done(&calls));
    seen
}

/// A connection that has sent half a request: the server hears it to its end, even while it ends.
fn half_asked(server: &ServerProcess) -> TcpStream {
    let mut probe = TcpStream::connect(server.address()).expect("the server accepts");
    probe.write_all(b"GET /ready HTTP/1.1\r\nhost: test\r\n").expect("the server reads");
    probe
}

/// Whether some connection is told that the server is not ready. Once it has failed, none is told that it is.
fn sees_unready(probes: &mut [TcpStream]) -> bool {
    let mut unready = false;
    for probe in probes {
        let asked = probe.write_all(b"\r\n").is_ok();
        let mut head = [0; 12];
        let answered = asked && probe.set_read_timeout(Some(Duration::from_secs(10))).is_ok() && probe.read_exact(&mut head).is_ok();
        match (answered, &head) {
            (true, b"HTTP/1.1 503") => unready = true,
            (true, b"HTTP/1.1 200") => assert!(!unready, "ready again after a failure"),
            (true, other) => panic!("{}", String::from_utf8_lossy(other)),
            (false, _) => {}
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    unready
}

#[test]
fn a_device_error_while_serving_reaches_the_client_and_ends_the_process() {
    for (script, words) in STRUCK {
        let unready = (0..TRIES).any(|_| fail_while_serving(script, words));
        assert!(unready, "{script}: /ready never said 503");
    }
}

/// Every request that is open when the device fails is told, also those that wait.
#[test]
fn all_open_requests_hear_of_a_device_error() {
    let fake = FakeCuda::new("hold cuEventSynchronize 5 held\nsticky cuEventSynchronize 30 719");
    fake.raise("held");
    let server = serve(&fake, &[]);
    let body = json!({"prompt": [1, 2, 3], "max_tokens": 1900, "temperature": 0, "ignore_eos": true});
    let asked: Vec<Connection> = (0..4).map(|_| post(&server, "/v1/completions", &body)).collect();
    wait("all are in", || metric(&server, "oxide_requests_in_flight") >= 4.0);
    fake.lower("held");
    for mut connection in asked {
        let reply = connection.reply();
        let error = reply.error();
        assert_eq!((reply.status, error["code"].as_str()), (500, Some("engine_failed")), "{error}");
        assert!(error["message"].as_str().is_some_and(|message| message.contains("CUDA_ERROR_LAUNCH_FAILED")), "{error}");
    }
    assert_eq!(server.wait().code(), Some(ENGINE));
}

#[test]
fn a_failed_copy_of_a_shared_page_names_the_page() {
    let fake = FakeCuda::new("fail cuMemcpyDtoDAsync_v2 3 719");
    let server = serve(&fake, &[]);
    let body = json!({"prompt": [1, 2, 3], "n": 2, "max_tokens": 40, "temperature": 0, "ignore_eos": true});
    let reply = post(&server, "/v1/completions", &body).reply();
    let error = reply.error();
    let words = ["copying page ", "cuMemcpyDtoDAsync_v2 failed: CUDA_ERROR_LAUNCH_FAILED (719)"];
    assert!(reply.status == 500 && words.iter().all(|word| error["message"].to_string().contains(word)), "{error}");
    assert_eq!(server.wait().code(), Some(ENGINE));
}
