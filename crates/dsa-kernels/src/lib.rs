//! dsa-kernels
