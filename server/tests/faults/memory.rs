//! Memory and threads that run short.

use crate::harness::{Setup, chat_body};
use crate::injection::{injected, settle};
use crate::requests::{Raw, kind};
use oxide_run::faults::{Fault, Faults, Inject, Place};
use serde_json::json;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};

#[test]
fn a_body_that_there_is_no_memory_for_is_refused_and_can_be_sent_again() {
    let (setup, injection) = injected(Setup::default());
    let live = setup.start();
    let body = chat_body(json!({"max_tokens": 2}));
    injection.starve(Place::BodyMemory);
    let refused = live.post("/v1/chat/completions", &body);
    assert_eq!((refused.status, refused.error()["code"].as_str()), (503, Some("out_of_memory")));
    assert!(refused.header("retry-after").is_some());
    injection.end();
    live.post("/v1/chat/completions", &body).ok();
    settle(&live);
}

/// Holds every thread that tokenizes.
#[derive(Default)]
struct Held {
    open: Mutex<bool>,
    opened: Condvar,
    inside: AtomicUsize,
    most: AtomicUsize,
    /// Requests that reached the threads' door.
    came: AtomicUsize,
}

impl Inject for Held {
    fn at(&self, place: Place) -> Fault {
        if place == Place::Tokenize {
            self.came.fetch_add(1, Ordering::AcqRel);
        }
        if place == Place::TokenizeThread {
            let inside = self.inside.fetch_add(1, Ordering::AcqRel) + 1;
            self.most.fetch_max(inside, Ordering::AcqRel);
            let open = self.open.lock().expect("nothing panics with it");
            drop(self.opened.wait_while(open, |open| !*open).expect("nothing panics with it"));
            self.inside.fetch_sub(1, Ordering::AcqRel);
        }
        Fault::None
    }
}

#[test]
fn threads_that_tokenize_are_bounded_also_when_their_clients_leave() {
    let held = Arc::new(Held::default());
    let faults = Faults::new(Arc::clone(&held) as Arc<dyn Inject>);
    let live = Setup::default().options(|options| options.faults = faults).start();
    let bound = std::thread::available_parallelism().map_or(2, |count| count.get());
    let bytes = kind("tokenizing much").bytes();
    for round in 1..=3 {
        let clients: Vec<Raw> = (0..bound)
            .map(|_| {
                let mut client = Raw::open(live.address);
                client.write(&bytes);
                client
            })
            .collect();
        live.wait("the requests", |_| held.came.load(Ordering::Acquire) == round * bound);
        live.wait("the threads", |_| held.inside.load(Ordering::Acquire) >= bound);
        drop(clients);
        live.wait("the disconnects", |live| live.metric("oxide_connections") == 1.0);
    }
    *held.open.lock().expect("nothing panics with it") = true;
    held.opened.notify_all();
    live.wait("the threads' end", |_| held.inside.load(Ordering::Acquire) == 0);
    assert_eq!(held.most.load(Ordering::Acquire), bound);
    settle(&live);
}
