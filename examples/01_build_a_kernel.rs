//! A kernel is a Rust function that emits PTX.
//!
//! `cargo run --example 01_build_a_kernel`

use ptx::*;

// Declared once: the host packs `AxpyArgs`, the device code sees `AxpyParams`. Swapping two buffers of different element
// types does not compile.
kernel_args! {
    /// `y += a * x`
    pub struct AxpyArgs / AxpyParams {
        /// [n] in and out
        pub y: DevicePtr<f32>,
        /// [n] input
        pub x: DevicePtr<f32>,
        /// factor
        pub a: f32,
        /// elements
        pub n: u32,
    }
}

/// `per_thread` elements for each thread: a plain Rust value, so it specialises the kernel, and the plain Rust `for` over
/// it unrolls. What the device decides is `when`.
fn axpy(threads: u32, per_thread: u32) -> Result<Kernel<AxpyArgs>, VerifyError> {
    let name = format!("axpy_x{per_thread}");
    build::<AxpyArgs>(&name, Target::Sm90a, LaunchBounds::threads(threads), |p| {
        let first = cta_index().mad(threads * per_thread, thread_index());
        for round in 0..per_thread {
            let i = first + round * threads;
            when(i.lt(p.n), || {
                let y = p.y.at(i);
                y.store(p.x.at(i).load().fma(p.a, y.load()));
            });
        }
    })
}

fn main() -> Result<(), VerifyError> {
    let kernel = axpy(128, 2)?;
    println!("{}", kernel.ptx());
    let ir = kernel.ir();
    println!("{}: {} instructions, {} bytes of arguments\n", ir.name, ir.insts.len(), ir.param_bytes());

    // The builder checks what it can see, and names the author's line.
    let broken = build::<()>("broken", Target::Sm90a, LaunchBounds::threads(64), |()| {
        let never_written = Var::<u32>::undefined();
        exit_if(never_written.get().eq(0));
    });
    let error = broken.expect_err("a register is read before anything writes it");
    println!("refused: {error}");
    Ok(())
}
