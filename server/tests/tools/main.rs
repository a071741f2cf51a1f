//! The bundle tools as a user meets them: the real program on the shipped model's real bundle.

mod check;
mod diff;
mod explain;
mod ghost;
mod kernels;
mod policy;
mod shipping;
mod sign;
mod support;
