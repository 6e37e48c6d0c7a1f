//! Kernel arguments, declared once for host and device.
//!
//! [`kernel_args!`](crate::kernel_args) turns one struct of host types into the launch-side packing and into a
//! companion struct of device-side handles. Reordering, swapping or resizing an argument changes both sides or
//! does not compile:
//!
//! ```compile_fail
//! ptx::kernel_args! {
//!     /// Arguments of `scale`.
//!     pub struct ScaleArgs / ScaleParams {
//!         /// [n] output
//!         pub out: ptx::DevicePtr<f32>,
//!         /// elements
//!         pub n: u32,
//!     }
//! }
//! // An f64 buffer is not an f32 buffer.
//! let args = ScaleArgs { out: ptx::DevicePtr::<f64>::from_address(0), n: 1 };
//! ```

use std::marker::PhantomData;

use crate::builder;
use crate::memory::Global;
use crate::op::{Op, Operand, RegId};
use crate::tensor_map::{TensorMap, TensorMapHandle};
use crate::ty::{Class, Elem};
use crate::value::Reg;

/// A device address of elements of type `T`. Plain data: it owns nothing and is not checked until a launch.
#[repr(transparent)]
pub struct DevicePtr<T> {
    address: u64,
    elem: PhantomData<fn() -> T>,
}

impl<T> Clone for DevicePtr<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for DevicePtr<T> {}
impl<T> PartialEq for DevicePtr<T> {
    fn eq(&self, other: &Self) -> bool {
        self.address == other.address
    }
}
impl<T> Eq for DevicePtr<T> {}
impl<T> std::fmt::Debug for DevicePtr<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:#x}", self.address)
    }
}

impl<T> DevicePtr<T> {
    /// The null address, for arguments that a specialisation does not read.
    pub const NULL: Self = DevicePtr { address: 0, elem: PhantomData };

    /// From a raw device address.
    pub fn from_address(address: u64) -> Self {
        DevicePtr { address, elem: PhantomData }
    }

    /// The raw device address.
    pub fn address(self) -> u64 {
        self.address
    }

    /// The same address as another element type.
    pub fn cast<U>(self) -> DevicePtr<U> {
        DevicePtr::from_address(self.address)
    }

    /// The address `bytes` further on.
    pub fn byte_add(self, bytes: u64) -> Self {
        DevicePtr::from_address(self.address.wrapping_add(bytes))
    }
}

/// One declared parameter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParamDecl {
    /// Field name.
    pub name: &'static str,
    /// What it is.
    pub kind: ParamKind,
    /// Byte offset in the parameter block.
    pub offset: u32,
    /// Size in bytes.
    pub bytes: u32,
}

/// How a parameter is declared and read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ParamKind {
    /// A 32-bit scalar.
    B32,
    /// A 64-bit scalar or device address.
    B64,
    /// A 128-byte tensor map by value, 64-byte aligned.
    TensorMap,
}

impl ParamKind {
    /// (size, alignment) in bytes.
    pub const fn layout(self) -> (u32, u32) {
        match self {
            ParamKind::B32 => (4, 4),
            ParamKind::B64 => (8, 8),
            ParamKind::TensorMap => (128, 64),
        }
    }
}

/// A type that can be a kernel argument.
pub trait Param: Copy {
    /// What the device code sees.
    type Handle: Copy;
    /// Declaration.
    const KIND: ParamKind;
    /// Appends the bytes, already aligned.
    fn write(&self, buf: &mut ArgBuffer);
    /// Emits the read of parameter number `index`.
    fn handle(index: u32) -> Self::Handle;
}

fn load_param(index: u32, class: Class) -> RegId {
    let dst = builder::fresh(class);
    builder::emit(Op::LdParam { dst, param: index });
    dst
}

macro_rules! scalar_param {
    ($($t:ty, $kind:ident, $class:ident;)*) => {$(
        impl Param for $t {
            type Handle = Reg<$t>;
            const KIND: ParamKind = ParamKind::$kind;
            fn write(&self, buf: &mut ArgBuffer) { buf.push(&self.to_le_bytes(), Self::KIND) }
            fn handle(index: u32) -> Self::Handle { Reg::from_operand(Operand::Reg(load_param(index, Class::$class))) }
        }
    )*};
}
scalar_param! { u32, B32, B32; i32, B32, B32; f32, B32, B32; u64, B64, B64; i64, B64, B64; }

impl<T: Elem> Param for DevicePtr<T> {
    type Handle = Global<T>;
    const KIND: ParamKind = ParamKind::B64;
    fn write(&self, buf: &mut ArgBuffer) {
        buf.push(&self.address.to_le_bytes(), Self::KIND)
    }
    fn handle(index: u32) -> Global<T> {
        Global::from_address(Reg::from_operand(Operand::Reg(load_param(index, Class::B64))))
    }
}

impl Param for TensorMap {
    type Handle = TensorMapHandle;
    const KIND: ParamKind = ParamKind::TensorMap;
    fn write(&self, buf: &mut ArgBuffer) {
        buf.push(self.bytes(), Self::KIND)
    }
    fn handle(index: u32) -> TensorMapHandle {
        let dst = builder::fresh(Class::B64);
        builder::emit(Op::ParamAddress { dst, param: index });
        TensorMapHandle::from_reg(dst)
    }
}

/// Most parameter bytes of one kernel.
pub const PARAM_BYTES_MAX: usize = 1024;
/// Most parameters of one kernel.
pub const PARAMS_MAX: usize = 48;

/// The packed arguments of one launch, on the stack.
#[repr(C, align(64))]
#[derive(Clone)]
pub struct ArgBuffer {
    bytes: [u8; PARAM_BYTES_MAX],
    len: usize,
    offsets: [u16; PARAMS_MAX],
    count: usize,
}

impl Default for ArgBuffer {
    fn default() -> Self {
        ArgBuffer { bytes: [0; PARAM_BYTES_MAX], len: 0, offsets: [0; PARAMS_MAX], count: 0 }
    }
}

impl ArgBuffer {
    /// Packs `args`.
    pub fn pack<A: KernelArgs>(args: &A) -> Self {
        let mut buf = ArgBuffer::default();
        args.write(&mut buf);
        buf
    }

    /// Appends one argument at its alignment.
    pub fn push(&mut self, bytes: &[u8], kind: ParamKind) {
        let (size, align) = kind.layout();
        assert_eq!(bytes.len(), size as usize, "an argument has the size of its declaration");
        let at = self.len.next_multiple_of(align as usize);
        self.bytes[at..at + bytes.len()].copy_from_slice(bytes);
        self.offsets[self.count] = at as u16;
        self.count += 1;
        self.len = at + bytes.len();
    }

    /// The parameter block.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }

    /// Byte offset of each argument in the block.
    pub fn offsets(&self) -> &[u16] {
        &self.offsets[..self.count]
    }
}

/// A struct of kernel arguments; implemented by [`kernel_args!`](crate::kernel_args).
pub trait KernelArgs: Copy {
    /// The device-side handles.
    type Params: Copy;
    /// Names and kinds in order.
    fn declare() -> Vec<ParamDecl>;
    /// Emits the reads and returns the handles.
    fn params() -> Self::Params;
    /// Packs the values.
    fn write(&self, buf: &mut ArgBuffer);
}

impl KernelArgs for () {
    type Params = ();
    fn declare() -> Vec<ParamDecl> {
        Vec::new()
    }
    fn params() {}
    fn write(&self, _: &mut ArgBuffer) {}
}

/// Lays out parameters in order, each at its alignment.
pub fn lay_out(fields: &[(&'static str, ParamKind)]) -> Vec<ParamDecl> {
    let mut end = 0u32;
    fields
        .iter()
        .map(|&(name, kind)| {
            let (bytes, align) = kind.layout();
            let offset = end.next_multiple_of(align);
            end = offset + bytes;
            ParamDecl { name, kind, offset, bytes }
        })
        .collect()
}

/// Declares a kernel's arguments: the host struct, the device handles, and the packing between them.
///
/// ```
/// ptx::kernel_args! {
///     /// Arguments of `axpy`.
///     pub struct AxpyArgs / AxpyParams {
///         /// [n] in and out
///         pub y: ptx::DevicePtr<f32>,
///         /// [n] input
///         pub x: ptx::DevicePtr<f32>,
///         /// factor
///         pub a: f32,
///         /// elements
///         pub n: u32,
///     }
/// }
/// ```
#[macro_export]
macro_rules! kernel_args {
    ($(#[$doc:meta])* $vis:vis struct $args:ident / $params:ident {
        $($(#[$field_doc:meta])* $field_vis:vis $field:ident : $ty:ty),* $(,)?
    }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug)]
        $vis struct $args { $($(#[$field_doc])* $field_vis $field: $ty),* }

        #[doc = concat!("Device-side handles of [`", stringify!($args), "`].")]
        #[derive(Clone, Copy)]
        $vis struct $params { $($(#[$field_doc])* $field_vis $field: <$ty as $crate::args::Param>::Handle),* }

        impl $crate::args::KernelArgs for $args {
            type Params = $params;
            fn declare() -> Vec<$crate::args::ParamDecl> {
                $crate::args::lay_out(&[$((stringify!($field), <$ty as $crate::args::Param>::KIND)),*])
            }
            #[allow(unused_assignments)]
            fn params() -> $params {
                let mut index = 0u32;
                $(
                    let $field = <$ty as $crate::args::Param>::handle(index);
                    index += 1;
                )*
                $params { $($field),* }
            }
            fn write(&self, buf: &mut $crate::args::ArgBuffer) {
                $( $crate::args::Param::write(&self.$field, buf); )*
            }
        }
    };
}
