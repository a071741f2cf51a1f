//! Tests of the compiler from outside: profiles, graph text, checkpoints, bundles, plans, the hub, the command line.

mod bundles;
mod checkpoints;
mod cli;
mod filetests;
mod planning;
mod profiles;
mod pull;
mod reproduce;
mod support;
