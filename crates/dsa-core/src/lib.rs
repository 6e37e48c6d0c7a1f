//! dsa-core
