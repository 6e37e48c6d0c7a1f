//! dump
use dsa_core::layout::fp8_page::ScaleForm;
use dsa_kernels::{score, select};
fn main() {
    let dir = std::env::args().nth(1).unwrap();
    for s in score::ScoreShape::all(&[2048]) {
        if s.scale_form() == ScaleForm::Fp32 && s.q() > 2 {
            continue;
        }
        let k = score::build(&s, ptx::Target::Sm90a).unwrap();
        println!("{} {} insts {} smem", s.name(), k.ir().insts.len(), k.ir().shared_bytes);
        std::fs::write(format!("{dir}/{}.ptx", s.name()), k.ptx()).unwrap();
    }
    for topk in [512, 1024, 2048, 4096] {
        let s = select::SelectShape::new(1, topk, 64).unwrap();
        let k = select::build(&s, ptx::Target::Sm90a).unwrap();
        println!("{} {} insts {} smem", s.name(), k.ir().insts.len(), k.ir().shared_bytes);
        std::fs::write(format!("{dir}/{}.ptx", s.name()), k.ptx()).unwrap();
    }
}
