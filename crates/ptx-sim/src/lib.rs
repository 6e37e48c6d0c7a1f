//! ptx-sim

pub mod mbarrier;
pub mod numeric;
pub mod race;
pub mod stream;
pub mod tensor_copy;
pub mod wgmma;
