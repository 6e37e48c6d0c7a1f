//! The scalar arithmetic against recorded hardware results, other implementations, and exact evaluation.

mod approximate;
mod exact;
mod hardware;
mod integers;
mod narrow;
mod single;
