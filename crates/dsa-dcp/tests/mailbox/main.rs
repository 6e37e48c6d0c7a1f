//! The query mailbox, with a kernel that publishes given rows in place of the query's.

#[path = "../common/mod.rs"]
mod common;

mod group;
mod mutations;
mod protocol;
