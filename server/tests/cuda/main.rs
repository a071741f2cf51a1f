//! The real program on the sm90 bundle of the shipped model, over a CUDA driver that needs no GPU: what is launched,
//! what is refused before anything is launched, how device errors end, what a decode step asks of the driver.
//!
//! The driver keeps books and computes nothing (`oxide_testkit::FakeCuda`), so the ids are those of zeroed memory.

#[expect(dead_code, reason = "shared with the tests over the scripted device, which use all of it")]
#[path = "../http/client.rs"]
mod client;
mod faults;
mod refusals;
mod steps;
mod support;
