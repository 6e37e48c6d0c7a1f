//! Every refusal of the host, before anything is launched.

mod common;

use common::*;
use dsa_core::layout::mla_entry::MlaCacheForm;
use dsa_core::layout::mla_rows::{QKV, QUERY};
use gpu::Device;
use mla_query::{MlaError, MlaQuery, MlaShape, MlaStep, MlaWeights};

#[test]
fn shapes_outside_the_limits_are_refused() {
    let shape = |heads, batch, page| MlaShape::new(heads, batch, MlaCacheForm::Fp8Ds, page);
    for heads in [0, 97, usize::MAX] {
        assert!(matches!(shape(heads, 1, 64), Err(MlaError::HeadsOutOfRange { .. })), "{heads}");
    }
    for batch in [0, 1025, usize::MAX] {
        assert!(matches!(shape(1, batch, 64), Err(MlaError::BatchOutOfRange { .. })), "{batch}");
    }
    for page in [0, (1 << 20) + 1] {
        assert!(matches!(shape(1, 1, page), Err(MlaError::PageOutOfRange { .. })), "{page}");
    }
    for (heads, batch) in [(1, 1), (96, 1024)] {
        shape(heads, batch, 1 << 20).unwrap();
    }
}

#[test]
fn tiles_and_copies_that_no_kernel_has_are_refused() {
    let shape = |batch| MlaShape::new(6, batch, MlaCacheForm::Fp8Ds, 64).unwrap();
    for tile in [0, 8, 24, 128] {
        let error = shape(4).with_tile(Some(tile)).unwrap_err();
        assert!(matches!(error, MlaError::TileUnsupported { .. }), "{tile}: {error}");
    }
    let error = shape(9).with_tile(None).unwrap_err();
    assert!(error.to_string().contains("tokens one by one for a batch of 9"), "{error}");
    for tile in [16, 32, 64] {
        let tiled = shape(8).with_tile(Some(tile)).unwrap();
        assert!(matches!(tiled.with_thread_copies(true), Err(MlaError::ThreadCopiesUnsupported { .. })), "{tile}");
        let threads = shape(8).with_tile(None).unwrap().with_thread_copies(true).unwrap();
        assert!(threads.with_tile(Some(tile)).is_err(), "{tile}");
        assert_eq!(tiled.with_tile(None).unwrap(), shape(8).with_tile(None).unwrap());
    }
}

#[test]
fn a_device_of_another_architecture_is_refused() {
    let devices = Device::simulated_group_as(sim_config(), ptx::Target::Sm100a);
    let shape = MlaShape::new(1, 1, MlaCacheForm::Fp8Ds, 64).unwrap();
    assert!(matches!(MlaQuery::new(&devices[0], shape), Err(MlaError::UnsupportedTarget { .. })));
}

/// Launches a step after `change`, on a device whose outputs must then still be poison.
#[track_caller]
fn refusal(form: MlaCacheForm, change: impl for<'a> FnOnce(&mut MlaStep<'a>, &'a Resident)) -> MlaError {
    let device = Device::simulated(sim_config());
    let step = Step::random(1, 2, 2);
    let shape = MlaShape::new(2, 3, form, step.page_tokens).unwrap().with_qc(true);
    let query = MlaQuery::new(&device, shape).unwrap();
    let resident = Resident::new(&device, &step, shape);
    resident.poison();
    let mut args = resident.step(&step);
    change(&mut args, &resident);
    let error = query.launch(&resident.stream, &args).expect_err("the step is refused");
    drop(args);
    let got = resident.read(&step);
    assert!(got.query.iter().chain(&got.cache).all(|b| *b == POISON), "nothing was launched");
    error
}

#[track_caller]
fn too_short(form: MlaCacheForm, name: &str, change: impl for<'a> FnOnce(&mut MlaStep<'a>, &'a Resident)) {
    match refusal(form, change) {
        MlaError::BufferTooShort { buffer, found, needed } => {
            assert_eq!(buffer, name);
            assert!(found < needed);
        }
        other => panic!("{name}: {other}"),
    }
}

#[test]
fn short_buffers_are_refused() {
    let ds = MlaCacheForm::Fp8Ds;
    let all = 2 * 2 * QUERY * 2;
    too_short(ds, "slots", |step, _| step.slots = step.slots.view(..1).unwrap());
    too_short(ds, "qkv", |step, _| step.qkv = step.qkv.view(..2 * QKV - 1).unwrap());
    too_short(ds, "qkv", |step, _| step.qkv_stride = QKV + 8);
    too_short(ds, "query", move |step, _| step.query = step.query.view(..all - 1).unwrap());
    too_short(ds, "q_c", |step, _| step.q_c = step.q_c.take().map(|v| v.view(..2 * 1536 - 1).unwrap()));
    too_short(ds, "dropped", |step, _| step.dropped = step.dropped.view(..0).unwrap());
    too_short(ds, "cache", |step, _| step.cache.bytes = step.cache.bytes.view(..3 * 64 * 656 - 1).unwrap());
    too_short(ds, "cache", |step, _| step.cache.pages = 4);
    let fp8 = MlaCacheForm::Fp8Divide;
    too_short(fp8, "k_scale", |step, _| step.k_scale = step.k_scale.take().map(|v| v.view(..0).unwrap()));
    too_short(fp8, "q_scale_inv", |step, _| step.q_scale_inv = step.q_scale_inv.take().map(|v| v.view(..0).unwrap()));
}

#[test]
fn a_batch_beyond_the_plan_is_refused() {
    let error = refusal(MlaCacheForm::Fp8Ds, |step, _| step.tokens = 4);
    assert!(matches!(error, MlaError::BatchOutOfRange { batch: 4 }), "{error}");
}

#[test]
fn strides_are_checked() {
    let stride = |change: fn(&mut MlaStep<'_>)| {
        let error = refusal(MlaCacheForm::Fp8Ds, move |step, _| change(step));
        assert!(matches!(error, MlaError::StrideUnsupported { .. }), "{error}");
    };
    stride(|step| step.qkv_stride = QKV - 8);
    stride(|step| step.qkv_stride = QKV + 4);
    stride(|step| step.cache.token_stride = 640);
    stride(|step| step.cache.token_stride = 664);
    stride(|step| step.cache.page_stride = 64 * 656 - 16);
    stride(|step| step.cache.page_stride = 64 * 656 + 8);
    // The last entry of a page may end it: a page stride below tokens times their stride is fine.
    let device = Device::simulated(sim_config());
    let step = Step { token_gap: 16, ..Step::random(1, 1, 1) };
    let shape = shape_of(&step, MlaCacheForm::Fp8Ds);
    let resident = Resident::new(&device, &step, shape);
    let mut args = resident.step(&step);
    args.cache.page_stride -= 16;
    MlaQuery::new(&device, shape).unwrap().launch(&resident.stream, &args).unwrap();
}

#[test]
fn misaligned_buffers_are_refused() {
    let misaligned =
        |name: &str, change: fn(&mut MlaStep<'_>)| match refusal(MlaCacheForm::Fp8Ds, move |step, _| change(step)) {
            MlaError::Misaligned { buffer, .. } => assert_eq!(buffer, name),
            other => panic!("{name}: {other}"),
        };
    misaligned("query", |step| step.query = step.query.view(8..).unwrap());
    misaligned("cache", |step| step.cache.bytes = step.cache.bytes.view(8..).unwrap());
    misaligned("q_c", |step| step.q_c = step.q_c.take().map(|v| v.view(4..).unwrap()));
    misaligned("qkv", |step| {
        step.tokens = 1;
        step.qkv = step.qkv.view(4..).unwrap();
    });
}

#[test]
fn arguments_that_the_shape_does_not_take_are_refused() {
    let presence = |form, change: fn(&mut MlaStep<'_>)| {
        let error = refusal(form, move |step, _| change(step));
        assert!(matches!(error, MlaError::Presence { .. }), "{error}");
    };
    presence(MlaCacheForm::Fp8Ds, |step| step.q_c = None);
    presence(MlaCacheForm::Fp8Divide, |step| step.k_scale = None);
    presence(MlaCacheForm::Fp8Multiply, |step| step.q_scale_inv = None);
    presence(MlaCacheForm::Nvfp4Ds, |step| step.k_scale = step.q_scale_inv.clone());
    let error = refusal(MlaCacheForm::Fp8Divide, |step, _| step.k_scale = None);
    assert!(error.to_string().contains("k_scale is absent"), "{error}");
}

#[test]
fn weights_belong_to_their_shape() {
    let device = Device::simulated(sim_config());
    let step = Step::random(1, 7, 1);
    let shape = shape_of(&step, MlaCacheForm::Fp8Ds);
    let resident = Resident::new(&device, &step, shape);
    let other = MlaShape::new(6, 1, MlaCacheForm::Fp8Ds, 64).unwrap().with_qc(true);
    let query = MlaQuery::new(&device, other).unwrap();
    let error = query.launch(&resident.stream, &resident.step(&step)).unwrap_err();
    assert!(matches!(error, MlaError::WrongWeights { .. }), "{error}");

    // A tiled kernel of the same cut copies with a swizzle.
    let small = Step::random(1, 8, 1);
    let resident = Resident::new(&device, &small, shape_of(&small, MlaCacheForm::Fp8Ds));
    let tiled = MlaShape::new(8, 9, MlaCacheForm::Fp8Ds, 64).unwrap().with_qc(true);
    let query = MlaQuery::new(&device, tiled).unwrap();
    let error = query.launch(&resident.stream, &resident.step(&small)).unwrap_err();
    assert!(matches!(error, MlaError::WrongWeights { .. }), "{error}");

    let buffers = [1536, 512, 6 * 192 * 1536, 6 * 128 * 512].map(|n| device.alloc_zeros::<u16>(n).unwrap());
    for short in 0..4 {
        let views = std::array::from_fn::<_, 4, _>(|i| {
            let n = buffers[i].len() - usize::from(i == short);
            buffers[i].view(..n).unwrap()
        });
        let error = MlaWeights::new(&device, &other, &views[0], &views[1], &views[2], &views[3]).unwrap_err();
        assert!(matches!(error, MlaError::BufferTooShort { .. }), "{error}");
        let views = std::array::from_fn::<_, 4, _>(|i| buffers[i].view(4 * usize::from(i == short)..).unwrap());
        let refused = MlaWeights::new(&device, &other, &views[0], &views[1], &views[2], &views[3]);
        assert!(refused.is_err());
    }
}

#[test]
fn memory_of_another_device_is_refused_by_name() {
    let form = MlaCacheForm::Fp8Divide;
    let devices = Device::simulated_group(gpu::SimConfig { devices: 2, ..sim_config() });
    let step = Step::random(1, 2, 2);
    let shape = shape_of(&step, form);
    let query = MlaQuery::new(&devices[0], shape).unwrap();
    let [mine, theirs] = [0, 1].map(|device| Resident::new(&devices[device], &step, shape));
    mine.poison();
    let check = |name: &str, change: for<'a> fn(&mut MlaStep<'a>, MlaStep<'a>)| {
        let mut args = mine.step(&step);
        change(&mut args, theirs.step(&step));
        match query.launch(&mine.stream, &args) {
            Err(MlaError::Device(gpu::Error::WrongDevice { what, .. })) => assert_eq!(what, name),
            other => panic!("{name}: {other:?}"),
        }
    };
    check("qkv", |step, theirs| step.qkv = theirs.qkv);
    check("slots", |step, theirs| step.slots = theirs.slots);
    check("weights", |step, theirs| step.weights = theirs.weights);
    check("query", |step, theirs| step.query = theirs.query);
    check("q_c", |step, theirs| step.q_c = theirs.q_c);
    check("cache", |step, theirs| step.cache = theirs.cache);
    check("dropped", |step, theirs| step.dropped = theirs.dropped);
    check("q_scale_inv", |step, theirs| step.q_scale_inv = theirs.q_scale_inv);
    check("k_scale", |step, theirs| step.k_scale = theirs.k_scale);
    let got = mine.read(&step);
    assert!(got.query.iter().chain(&got.cache).all(|b| *b == POISON), "nothing was launched");
}
