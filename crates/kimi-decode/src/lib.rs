//! kimi-decode
