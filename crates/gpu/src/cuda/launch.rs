//! Launches and tensor maps.

use std::ffi::c_void;

use cudarc::driver::sys::{self, CUlaunchAttributeID, CUresult};
use ptx::args::PARAMS_MAX;
use ptx::{ArgBuffer, Swizzle, TensorMap, TensorMapDesc};

use super::context::Context;
use super::driver;
use super::module::Loaded;
use super::stream::Stream;
use crate::device::L2Promotion;
use crate::error::Error;
use crate::function::LaunchConfig;

/// What a launch needs besides its arguments.
pub(crate) struct Launch<'a> {
    pub(crate) kernel: &'a str,
    pub(crate) loaded: &'a Loaded,
    pub(crate) threads: u32,
    pub(crate) shared_bytes: u32,
    pub(crate) config: LaunchConfig,
}

impl Stream {
    /// Enqueues a launch. Nothing is allocated and nothing waits.
    pub(crate) fn launch(&self, launch: &Launch<'_>, args: &ArgBuffer) -> Result<(), Error> {
        let context = self.context();
        context.bind()?;
        let mut attributes = [UNUSED_ATTRIBUTE; 2];
        let mut attribute_count = 0;
        if let Some(size) = launch.config.cluster {
            attributes[attribute_count] = cluster_attribute(size);
            attribute_count += 1;
        }
        if launch.config.overlap {
            attributes[attribute_count] = overlap_attribute();
            attribute_count += 1;
        }
        let config = sys::CUlaunchConfig {
            gridDimX: launch.config.grid[0],
            gridDimY: launch.config.grid[1],
            gridDimZ: launch.config.grid[2],
            blockDimX: launch.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: launch.shared_bytes,
            hStream: self.raw(),
            attrs: attributes.as_mut_ptr(),
            numAttrs: attribute_count as u32,
        };
        let bytes = args.bytes();
        let mut params = [std::ptr::null_mut::<c_void>(); PARAMS_MAX];
        for (param, offset) in params.iter_mut().zip(args.offsets()) {
            *param = bytes[*offset as usize..].as_ptr().cast_mut().cast();
        }
        let function = launch.loaded.function();
        // SAFETY: the context is bound; `config`, its attributes and the parameter bytes outlive the call, which
        // copies them; the parameters have the count, sizes and order of the kernel's declaration, because both come
        // from the type that the kernel and its arguments share.
        match unsafe { sys::cuLaunchKernelEx(&config, function, params.as_mut_ptr(), std::ptr::null_mut()) } {
            CUresult::CUDA_SUCCESS => {
                context.note_launch(self.launches(), launch.loaded.id);
                Ok(())
            }
            result => Err(refused(context, launch.kernel, result)),
        }
    }
}

#[cold]
fn refused(context: &Context, kernel: &str, result: CUresult) -> Error {
    match context.check("cuLaunchKernelEx", result) {
        Err(Error::Driver { name, code, .. }) => {
            Error::LaunchRefused { kernel: kernel.into(), reason: format!("{name} ({code})") }
        }
        Err(Error::OutOfMemory { .. }) => {
            Error::LaunchRefused { kernel: kernel.into(), reason: driver::explain(result) }
        }
        Err(other) => other,
        Ok(()) => unreachable!("a refused launch has an error result"),
    }
}

const UNUSED_ATTRIBUTE: sys::CUlaunchAttribute = sys::CUlaunchAttribute {
    id: CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_IGNORE,
    pad: [0; 4],
    value: sys::CUlaunchAttributeValue { pad: [0; 64] },
};

fn cluster_attribute(size: u32) -> sys::CUlaunchAttribute {
    let mut value = UNUSED_ATTRIBUTE.value;
    value.clusterDim = sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x: size, y: 1, z: 1 };
    sys::CUlaunchAttribute { id: CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, value, ..UNUSED_ATTRIBUTE }
}

fn overlap_attribute() -> sys::CUlaunchAttribute {
    let mut value = UNUSED_ATTRIBUTE.value;
    value.programmaticStreamSerializationAllowed = 1;
    sys::CUlaunchAttribute {
        id: CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
        value,
        ..UNUSED_ATTRIBUTE
    }
}

impl Context {
    /// Encodes a tensor map of bytes.
    pub(crate) fn tensor_map(&self, desc: &TensorMapDesc, promotion: L2Promotion) -> Result<TensorMap, Error> {
        self.bind()?;
        let mut map = sys::CUtensorMap { opaque: [0; 16] };
        let element_strides = [1u32; ptx::TENSOR_RANK_MAX];
        let swizzle = match desc.swizzle {
            Swizzle::None => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_NONE,
            Swizzle::B32 => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_32B,
            Swizzle::B64 => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_64B,
            Swizzle::B128 => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
        };
        let promotion = match promotion {
            L2Promotion::None => sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_NONE,
            L2Promotion::B64 => sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_64B,
            L2Promotion::B128 => sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            L2Promotion::B256 => sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        };
        // SAFETY: the context is bound; every array holds at least `rank` (strides: `rank` - 1) values and outlives
        // the call; the driver reads the address as a number and checks the rest.
        let encoded = unsafe {
            sys::cuTensorMapEncodeTiled(
                &mut map,
                sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT8,
                desc.rank as u32,
                desc.base as *mut c_void,
                desc.dims.as_ptr(),
                desc.strides.as_ptr(),
                desc.box_dims.as_ptr(),
                element_strides.as_ptr(),
                sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                swizzle,
                promotion,
                sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        };
        match encoded {
            CUresult::CUDA_ERROR_INVALID_VALUE => {
                Err(ptx::TensorMapError(format!("the driver does not accept {desc:?}")).into())
            }
            result => {
                self.check("cuTensorMapEncodeTiled", result)?;
                Ok(TensorMap::from_bytes(bytemuck::cast(map.opaque)))
            }
        }
    }
}
