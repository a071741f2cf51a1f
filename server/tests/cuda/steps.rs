//! Bundles that run: what is launched and counted, what a step asks of the driver, what is left behind.

use crate::client::{Event, Events};
use crate::support::*;
use oxide_testkit::{DriverCall, FakeCuda};
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};

/// Launches by the hash of their code object: those made one by one, and those of replayed graphs.
fn launches_by_hash(calls: &[DriverCall]) -> BTreeMap<String, u64> {
    let hash = |call: &DriverCall| call.get("sha256").unwrap_or("foreign").to_owned();
    let mut graphs: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    let mut counts = BTreeMap::new();
    for call in calls {
        match call.name.as_str() {
            "node" => graphs.entry(call.get("graph").expect("a graph")).or_default().push(hash(call)),
            "cuLaunchKernelEx" => *counts.entry(hash(call)).or_default() += 1,
            "cuGraphLaunch" => {
                for hash in &graphs[call.get("graph").expect("a graph")] {
                    *counts.entry(hash.clone()).or_default() += 1;
                }
            }
            _ => {}
        }
    }
    counts
}

#[test]
fn serving_launches_sealed_kernels_alone_and_counts_them() {
    let fake = FakeCuda::new("");
    let server = serve(&fake, &[]);
    for tokens in [1, 20] {
        let body = json!({"prompt": [1, 2, 3], "max_tokens": tokens, "temperature": 0, "ignore_eos": true});
        let reply = post(&server, "/v1/completions", &body).reply().ok();
        assert_eq!(reply["usage"]["completion_tokens"], tokens);
    }
    wait("idle", || metric(&server, "oxide_requests_running") == 0.0);
    let metrics = get(&server, "/metrics").text();
    let rows = metrics.lines().filter_map(|line| line.strip_prefix("oxide_kernel_launches_total{"));
    let exported: BTreeMap<String, u64> = rows
        .map(|row| {
            let (labels, count) = row.rsplit_once(' ').expect("labels and a value");
            let hash = labels.split("sha256=\"").nth(1).and_then(|rest| rest.split('"').next()).expect("a hash");
            (hash.to_owned(), count.parse().expect("a number"))
        })
        .collect();
    server.signal("TERM");
    assert_eq!(server.wait().code(), Some(0));

    let (calls, sealed) = (fake.calls(), sealed());
    let loaded: BTreeSet<String> =
        calls.iter().filter(|call| call.name == "cuModuleLoadData").filter_map(|call| call.get("sha256").map(str::to_owned)).collect();
    assert_eq!(loaded, sealed, "what is loaded is what is sealed");
    let launched = launches_by_hash(&calls);
    assert!(launched.len() > 5 && launched.keys().all(|hash| sealed.contains(hash)), "{launched:?}");
    assert_eq!(exported.keys().cloned().collect::<BTreeSet<_>>(), sealed);
    assert_eq!(exported.into_iter().filter(|(_, count)| *count > 0).collect::<BTreeMap<_, _>>(), launched);
    assert_eq!(refused(&calls), Vec::<&DriverCall>::new());
    assert_freed(&calls);
}

#[test]
fn every_node_of_every_graph_is_looked_at() {
    let fake = FakeCuda::new("");
    assert_eq!(generate(&fake, 2).code, Some(0));
    let (calls, sealed) = (fake.calls(), sealed());
    let nodes: Vec<_> = calls.iter().filter(|call| call.name == "node").collect();
    let kernels = nodes.iter().filter(|node| node.words.iter().any(|word| word == "kernel")).count();
    assert!(nodes.iter().filter_map(|node| node.get("sha256")).all(|hash| sealed.contains(hash)));
    assert!(count(&calls, "cuStreamEndCapture") > 5 && kernels > 100);
    assert_eq!(count(&calls, "cuGraphNodeGetType"), nodes.len());
    assert_eq!(count(&calls, "cuGraphKernelNodeGetParams_v2"), kernels);
}

/// Calls between launches of decode graphs, in order; the first after each launch comes first.
fn between_decode_steps(calls: &[DriverCall]) -> Vec<Vec<&DriverCall>> {
    let at: Vec<usize> = (0..calls.len()).filter(|&index| calls[index].name == "cuGraphLaunch").collect();
    at.windows(2).map(|pair| calls[pair[0] + 1..pair[1]].iter().collect()).collect()
}

#[test]
fn a_decode_step_asks_the_driver_for_these_calls_and_no_others() {
    let fake = FakeCuda::new("");
    assert_eq!(generate(&fake, 40).code, Some(0));
    let calls = fake.calls();
    let steps = between_decode_steps(&calls);
    // One token comes from the prompt's step; one step more may have been on its way when the last token came.
    assert!((38..=39).contains(&steps.len()), "{} steps", steps.len());
    let plain = ["cuMemcpyDtoHAsync_v2", "cuEventRecord", "cuEventSynchronize", "cuMemcpyHtoDAsync_v2"];
    let mut new_pages = 0;
    for step in &steps {
        let names: Vec<&str> = step.iter().map(|call| call.name.as_str()).collect();
        if names.len() == plain.len() + 1 {
            // One word of the block table, when the sequence begins a page.
            assert_eq!((names[4], step[4].get("bytes")), ("cuMemcpyHtoDAsync_v2", Some("4")), "{names:?}");
            new_pages += 1;
        }
        assert_eq!(names[..4], plain);
        assert!(names.len() <= 5, "{names:?}");
        // What is waited for is the step before the one just queued: the host runs ahead.
        assert_ne!(step[1].get("event"), step[2].get("event"));
    }
    assert_eq!(new_pages, 2, "positions 16 and 32 begin pages");
    let waits: Vec<_> = steps.windows(2).map(|pair| (pair[0][1].get("event"), pair[1][2].get("event"))).collect();
    assert!(waits.iter().all(|(recorded, waited)| recorded == waited && recorded.is_some()), "{waits:?}");
}

#[test]
fn memory_is_reserved_once_and_before_the_first_step() {
    let fake = FakeCuda::new("");
    assert_eq!(generate(&fake, 8).code, Some(0));
    let calls = fake.calls();
    assert_eq!(count(&calls, "cuMemAlloc_v2"), 1);
    let first = calls.iter().position(is_launch).expect("something is launched");
    let making = ["cuMemAlloc_v2", "cuMemHostAlloc", "cuEventCreate", "cuStreamCreate", "cuModuleLoadData", "cuStreamBeginCapture_v2"];
    let late: Vec<_> = calls[first..].iter().filter(|call| making.contains(&call.name.as_str())).collect();
    assert!(late.is_empty(), "made after the first launch: {late:?}");
    assert_freed(&calls);
}

/// Forty sequences begin at once: their block tables go as one transfer of all rows, or as one a row, never as both.
#[test]
fn many_changed_block_tables_are_one_transfer() {
    let fake = FakeCuda::new("");
    let server = serve(&fake, &["--max-choices", "64"]);
    let body = json!({"prompt": [1, 2, 3], "n": 40, "max_tokens": 40, "temperature": 0, "ignore_eos": true});
    assert_eq!(post(&server, "/v1/completions", &body).reply().ok()["usage"]["completion_tokens"], 1600);
    server.signal("TERM");
    assert_eq!(server.wait().code(), Some(0));
    let calls = fake.calls();
    let (mut transfers, mut whole_tables) = (0, 0);
    for call in &calls {
        match call.name.as_str() {
            "cuMemcpyHtoDAsync_v2" => transfers += 1,
            "cuMemcpy2DAsync_v2" => {
                assert_eq!(transfers, 1, "the values of the step, and no row of the table, went before");
                assert!(call.words.iter().any(|word| word == "rows=40"), "{call:?}");
                whole_tables += 1;
            }
            "cuGraphLaunch" | "cuLaunchKernelEx" => transfers = 0,
            _ => {}
        }
    }
    // At the beginning, and at each page that all of them begin together.
    assert!(whole_tables >= 3, "{whole_tables}");
    assert!(count(&calls, "cuMemcpyDtoDAsync_v2") > 0, "forks copy the page that they share");
    assert_eq!(refused(&calls), Vec::<&DriverCall>::new());
    assert_freed(&calls);
}

/// Alternatives are not fetched if no row wants any; that has to be right for rows behind the first, too.
#[test]
fn log_probabilities_without_alternatives_are_no_fault_in_a_batch() {
    let fake = FakeCuda::new("");
    let server = serve(&fake, &[]);
    let body = json!({"prompt": [1, 2, 3], "n": 3, "max_tokens": 4, "temperature": 0, "ignore_eos": true, "logprobs": 0});
    let reply = post(&server, "/v1/completions", &body).reply().ok();
    for choice in reply["choices"].as_array().expect("choices") {
        assert_eq!(choice["logprobs"]["token_logprobs"].as_array().map(Vec::len), Some(4), "{choice}");
    }
    server.signal("TERM");
    assert_eq!(server.wait().code(), Some(0));
}

#[test]
fn cancellation_gives_pages_back_within_two_steps() {
    let fake = FakeCuda::new("hold cuEventSynchronize 1 held");
    let server = serve(&fake, &[]);
    let body = json!({"prompt": [1, 2, 3], "max_tokens": 1900, "temperature": 0, "ignore_eos": true, "stream": true});
    let mut events = Events::begin(post(&server, "/v1/completions", &body));
    let Event::Data(chunk) = events.data() else { panic!("a token comes first") };
    fake.raise("held");
    wait("held", || count(&fake.calls(), "held") > 0);
    assert!(metric(&server, "oxide_kv_pages_in_use") > 0.0);
    let before = count(&fake.calls(), "cuGraphLaunch");
    let id = chunk["id"].as_str().expect("an id");
    let mut abort = crate::client::Connection::open(server.address());
    abort.send("DELETE", &format!("/v1/requests/{id}"), &[], b"");
    assert_eq!(abort.reply().status, 200);
    fake.lower("held");
    wait("pages back", || metric(&server, "oxide_kv_pages_in_use") == 0.0);
    let after = count(&fake.calls(), "cuGraphLaunch");
    assert!(after <= before + 2, "{} steps after the cancellation", after - before);
    server.signal("TERM");
    assert_eq!(server.wait().code(), Some(0));
    assert_freed(&fake.calls());
}

/// The engine's thread never ran a step, and still has to give back what another thread made.
#[test]
fn a_server_that_answered_nothing_gives_everything_back() {
    let fake = FakeCuda::new("");
    let server = serve(&fake, &[]);
    server.signal("TERM");
    assert_eq!(server.wait().code(), Some(0));
    let calls = fake.calls();
    assert_eq!(refused(&calls), Vec::<&DriverCall>::new());
    assert_freed(&calls);
    assert_no_launch(&fake);
}
