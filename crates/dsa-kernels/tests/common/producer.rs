//! A kernel that stands for whatever runs before: it lets its successor start at once, sleeps, and only then writes.

use std::marker::PhantomData;

use bytemuck::Pod;
use gpu::{Device, Function, LaunchConfig, Stream, View};
use ptx::*;

kernel_args! {
    /// Copies up to three runs of words, late.
    pub struct ProduceArgs / ProduceParams {
        /// `[words_a]` output
        pub to_a: DevicePtr<u32>,
        /// `[words_b]` output
        pub to_b: DevicePtr<u32>,
        /// `[words_c]` output
        pub to_c: DevicePtr<u32>,
        /// `[words_a]`
        pub from_a: DevicePtr<u32>,
        /// `[words_b]`
        pub from_b: DevicePtr<u32>,
        /// `[words_c]`
        pub from_c: DevicePtr<u32>,
        /// words
        pub words_a: u32,
        /// words
        pub words_b: u32,
        /// words
        pub words_c: u32,
        /// sleep before writing, in nanoseconds
        pub sleep_ns: u32,
    }
}

const THREADS: u32 = 256;
const CTAS: u32 = 2;

/// The producer on a device.
pub struct Producer {
    function: Function<ProduceArgs>,
    /// Sleep before writing, in nanoseconds.
    pub sleep_ns: u32,
}

impl Producer {
    pub fn new(device: &Device) -> Producer {
        let target = device.target().unwrap();
        let kernel = build::<ProduceArgs>("produce_late", target, LaunchBounds::threads(THREADS), |p| {
            wait_for_dependencies();
            launch_dependents();
            nanosleep(p.sleep_ns);
            let first = cta_index().mad(THREADS, thread_index());
            let runs = [(p.to_a, p.from_a, p.words_a), (p.to_b, p.from_b, p.words_b), (p.to_c, p.from_c, p.words_c)];
            for (to, from, words) in runs {
                for_range(first, words, THREADS * CTAS, |i| to.at(i).store(from.at(i).load()));
            }
        });
        Producer { function: device.load(&kernel.unwrap()).unwrap(), sleep_ns: 20_000 }
    }

    /// Copies each run; overlaps its predecessor.
    pub fn launch(&self, stream: &Stream, [a, b, c]: [Words<'_>; 3]) -> Result<(), gpu::Error> {
        let args = ProduceArgs {
            to_a: a.to,
            to_b: b.to,
            to_c: c.to,
            from_a: a.from,
            from_b: b.from,
            from_c: c.from,
            words_a: a.words,
            words_b: b.words,
            words_c: c.words,
            sleep_ns: self.sleep_ns,
        };
        self.function.launch(stream, LaunchConfig::new(CTAS).overlap(true), &args)
    }
}

/// A copy of whole words.
#[derive(Clone, Copy)]
pub struct Words<'a> {
    to: DevicePtr<u32>,
    from: DevicePtr<u32>,
    words: u32,
    memory: PhantomData<&'a u32>,
}

impl<'a> Words<'a> {
    /// All of `from` to the start of `to`.
    pub fn new<T: Pod>(to: &View<'a, T>, from: &View<'a, T>) -> Words<'a> {
        assert!(from.bytes() <= to.bytes() && from.bytes().is_multiple_of(4));
        let words = u32::try_from(from.bytes() / 4).unwrap();
        Words { to: to.ptr_as(), from: from.ptr_as(), words, memory: PhantomData }
    }

    /// Nothing.
    pub fn none() -> Words<'a> {
        Words { to: DevicePtr::NULL, from: DevicePtr::NULL, words: 0, memory: PhantomData }
    }
}
