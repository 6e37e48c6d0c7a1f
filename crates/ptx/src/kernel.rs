//! A finished kernel: the instruction list, its parameters, shared layout and launch bounds.

use std::marker::PhantomData;
use std::panic::Location;
use std::sync::Arc;

use crate::args::{KernelArgs, ParamDecl};
use crate::op::{LabelId, Op};
use crate::ty::Class;
use crate::verify::VerifyError;

/// A GPU architecture to generate for. `a` targets load only on exactly that architecture.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Target {
    /// Hopper, compute capability 9.0.
    Sm90a,
    /// Blackwell, compute capability 10.0.
    Sm100a,
}

impl Target {
    /// Every target.
    pub const ALL: [Target; 2] = [Target::Sm90a, Target::Sm100a];

    /// The `.target` name.
    pub fn name(self) -> &'static str {
        match self {
            Target::Sm90a => "sm_90a",
            Target::Sm100a => "sm_100a",
        }
    }

    /// The lowest `.version` that has what this builder emits for the target, so that older drivers load it.
    pub fn ptx_version(self) -> &'static str {
        match self {
            Target::Sm90a => "8.4",
            Target::Sm100a => "8.8",
        }
    }

    /// The compute capability (major, minor) that loads this target.
    pub fn compute_capability(self) -> (u32, u32) {
        match self {
            Target::Sm90a => (9, 0),
            Target::Sm100a => (10, 0),
        }
    }

    /// The target for a compute capability, if one is supported.
    pub fn for_compute_capability(major: u32, minor: u32) -> Option<Target> {
        Target::ALL.into_iter().find(|t| t.compute_capability() == (major, minor))
    }

    /// Most dynamic shared memory one CTA may use, in bytes.
    pub fn shared_bytes_max(self) -> u32 {
        232_448
    }
}

impl std::fmt::Display for Target {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl std::str::FromStr for Target {
    type Err = String;
    fn from_str(s: &str) -> Result<Self, String> {
        Target::ALL
            .into_iter()
            .find(|t| t.name() == s)
            .ok_or_else(|| format!("unknown target {s:?}, expected one of sm_90a, sm_100a"))
    }
}

/// Threads of a CTA and the assembler's register bounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LaunchBounds {
    /// Threads per CTA (exact, one-dimensional).
    pub threads: u32,
    /// CTAs that must fit one multiprocessor; caps registers, which `setmaxnreg` needs.
    pub min_ctas: u32,
    /// Register cap per thread, if tighter than what `min_ctas` gives.
    pub max_registers: Option<u32>,
    /// CTAs per cluster along x, `None` for a kernel that knows nothing of clusters. Every launch has these clusters.
    pub cluster: Option<u32>,
}

impl LaunchBounds {
    /// `threads` per CTA, one CTA per multiprocessor.
    pub fn threads(threads: u32) -> Self {
        LaunchBounds { threads, min_ctas: 1, max_registers: None, cluster: None }
    }

    /// With at least `n` CTAs resident per multiprocessor.
    pub fn min_ctas(mut self, n: u32) -> Self {
        self.min_ctas = n;
        self
    }

    /// In clusters of `n` CTAs along x. More than 8 are not portable, but every target has them.
    pub fn cluster(mut self, n: u32) -> Self {
        self.cluster = Some(n);
        self
    }

    /// With at most `n` registers per thread.
    pub fn max_registers(mut self, n: u32) -> Self {
        self.max_registers = Some(n);
        self
    }
}

/// One array of the kernel's shared layout.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SharedField {
    /// Name, for fault messages.
    pub name: &'static str,
    /// Byte offset in the layout.
    pub offset: u32,
    /// Size in bytes.
    pub bytes: u32,
}

/// An instruction and the Rust line that emitted it.
#[derive(Clone, Debug)]
pub struct Inst {
    /// What it does.
    pub op: Op,
    /// Who emitted it.
    pub loc: &'static Location<'static>,
}

/// The untyped body of a kernel, shared by printer, verifier and simulator.
#[derive(Clone, Debug)]
pub struct KernelIr {
    /// PTX entry name.
    pub name: String,
    /// Architecture.
    pub target: Target,
    /// Threads and register bounds.
    pub bounds: LaunchBounds,
    /// Parameters in order.
    pub params: Vec<ParamDecl>,
    /// The shared layout; offsets are from its base, which is 1024-byte aligned.
    pub shared: Vec<SharedField>,
    /// Bytes of dynamic shared memory that a launch needs.
    pub shared_bytes: u32,
    /// Instructions in text order.
    pub insts: Vec<Inst>,
    /// Number of registers per class, indexed as [`Class::ALL`].
    pub registers: [u32; 4],
    /// Number of labels.
    pub labels: u32,
}

impl KernelIr {
    /// Position of each label in `insts`.
    pub fn label_positions(&self) -> Vec<usize> {
        let mut at = vec![usize::MAX; self.labels as usize];
        for (i, inst) in self.insts.iter().enumerate() {
            if let Op::Label { label: LabelId(l) } = inst.op {
                at[l as usize] = i;
            }
        }
        at
    }

    /// Number of registers of `class`.
    pub fn register_count(&self, class: Class) -> u32 {
        self.registers[Class::ALL.iter().position(|c| *c == class).expect("every class is in ALL")]
    }

    /// Whether the kernel waits for the launches it depends on: only such a kernel may be launched with
    /// programmatic overlap.
    pub fn waits_for_dependencies(&self) -> bool {
        self.insts.iter().any(|i| i.op == Op::GridDepWait)
    }

    /// The layout field that holds byte `offset`, for messages.
    pub fn shared_field_at(&self, offset: u32) -> Option<&SharedField> {
        self.shared.iter().find(|f| (f.offset..f.offset + f.bytes).contains(&offset))
    }

    /// Total size of the parameters in bytes.
    pub fn param_bytes(&self) -> u32 {
        self.params.last().map_or(0, |p| p.offset + p.bytes)
    }
}

/// A verified kernel that takes arguments of type `A`.
///
/// The type parameter makes a launch with another kernel's arguments a compile error.
pub struct Kernel<A> {
    ir: Arc<KernelIr>,
    args: PhantomData<fn(&A)>,
}

impl<A> Clone for Kernel<A> {
    fn clone(&self) -> Self {
        Kernel { ir: self.ir.clone(), args: PhantomData }
    }
}

impl<A> std::fmt::Debug for Kernel<A> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Kernel").field("name", &self.ir.name).field("target", &self.ir.target).finish()
    }
}

impl<A: KernelArgs> Kernel<A> {
    pub(crate) fn new(ir: KernelIr) -> Self {
        Kernel { ir: Arc::new(ir), args: PhantomData }
    }

    /// A kernel from an instruction list, for tools that rewrite one (tests drop a fence and see who notices).
    ///
    /// # Errors
    /// A rule that the list breaks, or parameters that are not those of `A`.
    pub fn from_ir(ir: KernelIr) -> Result<Self, VerifyError> {
        if ir.params != A::declare() {
            let rule = format!("parameters {:?} are not those of {}", ir.params, std::any::type_name::<A>());
            return Err(VerifyError { kernel: ir.name, rule, at: None });
        }
        crate::verify::verify(&ir)?;
        Ok(Kernel::new(ir))
    }

    /// The instruction list and its declarations.
    pub fn ir(&self) -> &Arc<KernelIr> {
        &self.ir
    }

    /// The PTX text.
    pub fn ptx(&self) -> String {
        crate::print::print(&self.ir)
    }
}
