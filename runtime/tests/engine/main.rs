//! The engine from outside, over the scripted device: whoever runs beside a request, its tokens are the same.

mod admission;
mod cache;
mod choices;
mod faults;
mod lifecycle;
mod queueing;
mod random;
mod real;
mod sampling;
mod support;
mod tokens;
