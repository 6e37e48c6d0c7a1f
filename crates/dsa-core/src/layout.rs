//! Byte layouts of the buffers that the host and the kernels share, as executable tables: all ranges half-open, in bytes
//! from the start of the record.

pub mod b_row;
pub mod field;
pub mod fp8_page;
pub mod head_weights;
pub mod ll_slot;
pub mod mla_entry;
pub mod mla_rows;
pub mod mxfp4_page;
pub mod pitched_scratch;
pub mod query_row;
pub mod tp_scratch;
