//! Every arithmetic instruction against scalar Rust, lane by lane.

mod common;

use common::*;
use ptx::op::{Bf16Bin, Bin, Cmp, Cvt, CvtPack, DivMode, Inst as _Unused};
