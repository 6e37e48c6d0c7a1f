//! The workspace root owns the cross-crate tests and benches; see `tests/` and `benches/`.
