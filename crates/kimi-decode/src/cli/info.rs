//! `info`: what is here, and what can run on it.

use std::io::Write;

use gpu::{Device, DeviceInfo, SimConfig};
use kimi_decode::{DcpSpec, FusedIndexer, LayerSpec, ScratchSpec, StepShape};

use super::Failure;

/// Prints the devices and what runs on them.
pub fn run(stdout: &mut impl Write) -> Result<(), Failure> {
    let mut devices = Vec::new();
    match Device::cuda_count() {
        Err(error) => writeln!(stdout, "CUDA        unavailable: {error}")?,
        Ok(count) => {
            writeln!(stdout, "CUDA        {count} device(s)")?;
            for ordinal in 0..count {
                match Device::cuda(ordinal) {
                    Ok(device) => devices.push(device),
                    Err(error) => writeln!(stdout, "cuda:{ordinal}      unusable: {error}")?,
                }
            }
        }
    }
    devices.push(Device::simulated(SimConfig::default()));
    for device in &devices {
        print_device(stdout, device.info())?;
    }
    if devices.len() > 2 {
        print_links(stdout, &devices[..devices.len() - 1])?;
    }

    writeln!(stdout, "\npaths")?;
    for device in &devices {
        let path = format!("index on {}", short_name(device.info()));
        match FusedIndexer::supports(device, &DEPLOYED_SCRATCH, &DEPLOYED_LAYER, StepShape { rows: 320, q: 1 }) {
            Ok(()) => writeln!(stdout, "  {path:<28} runs: FP8 keys, UE8M0 or FP32 scales, top-k up to 4096, q 1..=8")?,
            Err(reason) => writeln!(stdout, "  {path:<28} does not run: {reason}")?,
        }
    }
    for device in &devices {
        let path = format!("index --dcp on {}", short_name(device.info()));
        let shape = StepShape { rows: 320, q: 1 };
        match FusedIndexer::supports_sharded(device, &DEPLOYED_DCP, 8, &DEPLOYED_LAYER, Some(512), shape) {
            Ok(()) => writeln!(stdout, "  {path:<28} runs: 1 to 16 ranks, pushes where they map each other's memory")?,
            Err(reason) => writeln!(stdout, "  {path:<28} does not run: {reason}")?,
        }
    }
    match gpu::nccl::version() {
        Ok(version) => writeln!(stdout, "  {NCCL:<28} runs: NCCL {version}, a GPU per rank")?,
        Err(reason) => writeln!(stdout, "  {NCCL:<28} does not run: {reason}")?,
    }
    for (path, why) in NOT_BUILT {
        writeln!(stdout, "  {path:<28} not built yet: {why}")?;
    }
    Ok(())
}

/// Parts of the design that this version does not have.
const NOT_BUILT: [(&str, &str); 2] = [
    ("index for sm_100a", "score uses wgmma of sm_90a, Blackwell needs a tcgen05 form"),
    ("index of MXFP4 keys", "score reads FP8 pages only"),
];

/// The deployed sizes, to ask what a device serves.
const DEPLOYED_LAYER: LayerSpec = LayerSpec {
    topk: 2048,
    context_len_max: 1 << 20,
    scale_form: dsa_core::layout::fp8_page::ScaleForm::Ue8m0,
    index_page: 64,
    index_blocks: 1 << 15,
    index_page_stride: dsa_core::layout::fp8_page::BYTES,
    kv_page: 64,
    kv_block_rows: 64,
    kv_blocks: 1 << 15,
};
/// The same over ranks.
const DEPLOYED_DCP: DcpSpec =
    DcpSpec { rows_max: 320, push_rows_max: 320, interleave: 1, context_len_max: 1 << 20, topk: 2048, ids: false };
/// The all-gather for ranks that cannot map each other's memory.
const NCCL: &str = "all-gather between ranks";
const DEPLOYED_SCRATCH: ScratchSpec = ScratchSpec { rows_max: 320, length_max: 1 << 20, topk: 2048, ids: false };

/// `cuda:0` or `sim:0`.
fn short_name(info: &DeviceInfo) -> &str {
    info.name.split(' ').next().unwrap_or(&info.name)
}

fn print_device(stdout: &mut impl Write, info: &DeviceInfo) -> Result<(), Failure> {
    let (major, minor) = info.compute_capability;
    let target = info.target.map_or("no kernels for it".to_string(), |target| target.to_string());
    let driver = match info.driver_version {
        Some(version) => format!("driver {version}"),
        None => "simulated".to_string(),
    };
    writeln!(
        stdout,
        "{:<11} compute capability {major}.{minor} ({target}), {} SMs, {:.1} GiB, L2 {} MiB, {} KiB shared per CTA, {driver}",
        info.name,
        info.sms,
        info.memory_bytes as f64 / (1u64 << 30) as f64,
        info.l2_bytes >> 20,
        info.shared_bytes_max >> 10,
    )?;
    Ok(())
}

fn print_links(stdout: &mut impl Write, devices: &[Device]) -> Result<(), Failure> {
    for (i, a) in devices.iter().enumerate() {
        for b in &devices[i + 1..] {
            let link = match a.peer_access(b).and_then(|()| b.peer_access(a)) {
                Ok(()) => "peer access both ways".to_string(),
                Err(error) => error.to_string(),
            };
            writeln!(stdout, "link        {} - {}: {link}", short_name(a.info()), short_name(b.info()))?;
        }
    }
    Ok(())
}
