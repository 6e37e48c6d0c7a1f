//! ptx-sim

pub mod numeric;
