//! ptx-sim

pub mod numeric;
pub mod race;
