//! The server under faults: clients that leave at every point of a request, panics, refused memory, a
//! failing device, and bytes that nobody should send.
//!
//! `docs/operations.md` says what is guaranteed, and which test shows it.

#[expect(dead_code, reason = "shared with the tests of the API, which use all of it")]
#[path = "../http/client.rs"]
mod client;
mod device;
mod disconnect;
mod fuzz;
#[expect(dead_code, reason = "shared with the tests of the API, which use all of it")]
#[path = "../http/harness.rs"]
mod harness;
mod injection;
mod memory;
mod panics;
mod requests;
