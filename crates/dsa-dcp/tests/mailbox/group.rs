//! Groups of ranks that publish and gather rows. As many simulated devices as ranks always, and all ranks on one GPU when
//! there is one.

use std::time::Duration;

use dsa_core::generate::SplitMix64;
use dsa_dcp::mailbox::device::{Outbox, Team};
use dsa_dcp::mailbox::gather::{GatherArgs, build as build_gather};
use dsa_dcp::mailbox::layout::{BOX, CALL, SENTINEL, STATE_WORDS};
use dsa_dcp::{DcpError, Gather, GatherShape, GatherStep, Limits, MailboxShape, QueryElement, QueryMailbox};
use gpu::{Buffer, Device, Function, Graph, LaunchConfig, SimConfig, Stream};
use parking_lot::Mutex;
use ptx::*;

use crate::common::{Rewrite, as_every_rank, gpus, sim_config};

/// Threads of a publishing CTA.
const THREADS: u32 = 64;
/// What outputs hold before a run, and rows that nobody copied.
const POISON: u32 = 0xA5A5_A5A5;

kernel_args! {
    /// Publishes given rows.
    pub struct SendArgs / SendParams {
        /// `[tokens, heads, row words]`
        pub rows: DevicePtr<u32>,
        /// this rank's boxes
        pub boxes: DevicePtr<u64>,
        /// `[ranks]`
        pub peers: DevicePtr<u64>,
        /// address of all boxes, 0 if there is none
        pub multicast: u64,
        /// the call's state
        pub state: DevicePtr<u32>,
        /// the status
        pub status: DevicePtr<u32>,
        /// this rank
        pub rank: u32,
        /// tokens
        pub tokens: u32,
        /// milliseconds to sleep before each CTA's part
        pub sleep_ms: u32,
    }
}

kernel_args! {
    /// Reads the box of the last call as attention would.
    pub struct ReadArgs / ReadParams {
        /// `[tokens, published, row words]`
        pub out: DevicePtr<u32>,
        /// this rank's boxes
        pub boxes: DevicePtr<u64>,
        /// the call's state
        pub state: DevicePtr<u32>,
        /// the status
        pub status: DevicePtr<u32>,
        /// tokens
        pub tokens: u32,
    }
}

/// What a group of ranks is built for.
#[derive(Clone, Copy, Debug)]
pub struct Spec {
    pub shape: MailboxShape,
    pub multicast: bool,
    pub copy: bool,
    pub hold: bool,
    /// Whether the publishing kernel may start before its predecessor has ended.
    pub overlap: bool,
    /// CTAs of the publishing kernel.
    pub ctas: u32,
    pub poll: Duration,
}

impl Spec {
    /// Two E4M3 heads per rank, up to 3 tokens, read in place, a store per peer.
    pub fn new(ranks: usize) -> Spec {
        Spec {
            shape: MailboxShape::new(ranks, 2, 64, 3, QueryElement::E4m3).unwrap(),
            multicast: false,
            copy: false,
            hold: false,
            overlap: true,
            ctas: 3,
            poll: Duration::from_millis(200),
        }
    }

    /// 32-bit words of a row.
    fn row_words(&self) -> usize {
        self.shape.row_bytes() / 4
    }

    fn limits(&self) -> Limits {
        Limits { poll: self.poll, collective: Duration::from_secs(30) }
    }

    fn gather(&self) -> GatherShape {
        GatherShape::new(self.shape).with_copy(self.copy).with_hold(self.hold)
    }
}

/// The kernel that publishes: chunks by pairs, by words and whole in turn, of every row some by every CTA.
fn build_send(spec: &Spec) -> Kernel<SendArgs> {
    let (shape, multicast, ctas) = (spec.shape, spec.multicast, spec.ctas);
    let kernel = build::<SendArgs>("send_rows", Target::Sm90a, LaunchBounds::threads(THREADS), |p| {
        wait_for_dependencies();
        launch_dependents();
        let outbox = Outbox {
            shape,
            boxes: p.boxes,
            peers: p.peers,
            multicast: multicast.then_some(p.multicast),
            state: p.state,
            status: p.status,
            rank: p.rank,
        };
        let thread = thread_index();
        let team = Team { thread, threads: THREADS, cta: cta_index(), ctas: Reg::from(ctas) };
        let begun = outbox.begin(team, sync_threads);
        for_range(0u32, p.sleep_ms, 1u32, |_| nanosleep(1_000_000u32));
        begun.publish(p.tokens, |call| {
            let (heads, words) = (shape.heads() as u32, shape.row_bytes() as u32 / 4);
            for_range(0u32, p.tokens * heads, 1u32, |row| {
                let (token, head) = (row / heads, row % heads);
                let from = p.rows.at64(row.mul_wide(words));
                for_range(thread.mad(ctas, cta_index()), words / 4, THREADS * ctas, |chunk| {
                    let word = chunk * 4;
                    let send_words = |places: &[u32]| {
                        for i in places {
                            let at = word + *i;
                            call.send(token, head, at * 4, [from.at(at).load()]);
                        }
                    };
                    let send_pairs = || {
                        for i in [2u32, 0] {
                            let at = word + i;
                            call.send(token, head, at * 4, from.at(at).load_vec::<2>());
                        }
                    };
                    let send_chunk = || call.send(token, head, word * 4, from.at(word).load_vec::<4>());
                    // Words of one 8-byte half arrive in order: each of the four is the last of its half for some head.
                    let send_each =
                        || when_else((head & 1).eq(0), || send_words(&[3, 1, 0, 2]), || send_words(&[0, 2, 1, 3]));
                    let rest = || when_else((chunk % 3).eq(1), send_each, send_chunk);
                    when_else((chunk % 3).eq(0), send_pairs, rest);
                });
            });
        });
    });
    kernel.unwrap()
}

/// Weak reads of every published row, by CTAs that overlap what precedes them. Of a mailbox that has failed nothing: late
/// rows may be arriving.
fn build_read(shape: MailboxShape) -> Kernel<ReadArgs> {
    let kernel = build::<ReadArgs>("read_rows", Target::Sm90a, LaunchBounds::threads(THREADS), |p| {
        wait_for_dependencies();
        launch_dependents();
        let index = p.state.offset(BOX as i32).load();
        let rows = p.boxes.byte_at(index.mul_wide(shape.box_bytes() as u32)).cast::<u32>();
        let (published, words) = (shape.published() as u32, shape.row_bytes() as u32 / 4);
        when(p.status.load().eq(0), || {
            for_range(cta_index(), p.tokens * published, cta_count(), |row| {
                let at = (row / published) * shape.q_heads() as u32 + row % published;
                for_range(thread_index(), words, THREADS, |word| {
                    let value = rows.at64(at.mul_wide(words)).at(word).load();
                    p.out.at64(row.mul_wide(words)).at(word).store(value);
                });
            });
        });
    });
    kernel.unwrap()
}

fn cta_count() -> Reg<u32> {
    special(Special::NctaidX)
}

/// One rank.
pub struct Rank {
    pub stream: Stream,
    pub mailbox: QueryMailbox,
    send: Function<SendArgs>,
    gather: Gather,
    read: Function<ReadArgs>,
    device: Device,
}

/// All ranks, in one process.
pub struct Group {
    pub spec: Spec,
    pub ranks: Vec<Rank>,
}

impl Group {
    pub fn simulated(spec: &Spec, config: SimConfig) -> Group {
        let devices = Device::simulated_group(SimConfig { devices: spec.shape.ranks(), ..config });
        Group::new(spec, &devices, None, None)
    }

    /// With kernels rewritten, if asked.
    pub fn new(spec: &Spec, devices: &[Device], send: Option<Rewrite<'_>>, gather: Option<Rewrite<'_>>) -> Group {
        let mut sending = build_send(spec);
        if let Some(rewrite) = send {
            let mut ir = KernelIr::clone(sending.ir());
            rewrite(&mut ir);
            sending = Kernel::<SendArgs>::from_ir(ir).unwrap();
        }
        let mut gathering = build_gather(&spec.gather(), Target::Sm90a).unwrap();
        if let Some(rewrite) = gather {
            let mut ir = KernelIr::clone(gathering.ir());
            rewrite(&mut ir);
            gathering = Kernel::<GatherArgs>::from_ir(ir).unwrap();
        }
        let reading = build_read(spec.shape);
        let mailboxes = QueryMailbox::in_process(&devices[..spec.shape.ranks()], spec.shape, spec.limits()).unwrap();
        let ranks = devices.iter().zip(mailboxes).map(|(device, mailbox)| {
            assert!(!spec.multicast || mailbox.has_multicast());
            Rank {
                stream: device.stream().unwrap(),
                mailbox,
                send: device.load(&sending).unwrap(),
                gather: Gather::from_kernel(device, spec.gather(), &gathering).unwrap(),
                read: device.load(&reading).unwrap(),
                device: device.clone(),
            }
        });
        Group { spec: *spec, ranks: ranks.collect() }
    }

    pub fn all(&self) -> Vec<usize> {
        (0..self.ranks.len()).collect()
    }

    /// Starts `rank`'s part of a call, `sleep_ms` late between its refill and its publication.
    pub fn send(&self, step: &Step, rank: usize, sleep_ms: u32) -> Result<(), DcpError> {
        let Rank { stream, mailbox, send, .. } = &self.ranks[rank];
        let publish = mailbox.publish();
        let args = SendArgs {
            rows: step.buffers[rank].rows.ptr(),
            boxes: publish.boxes.ptr(),
            peers: publish.peers.ptr(),
            multicast: publish.multicast.unwrap_or(0),
            state: publish.state.ptr(),
            status: publish.status.ptr(),
            rank: rank as u32,
            tokens: step.tokens as u32,
            sleep_ms,
        };
        Ok(send.launch(stream, LaunchConfig::new(self.spec.ctas).overlap(self.spec.overlap), &args)?)
    }

    /// Gathers on `rank`, and reads the rows unless the gather copies them.
    pub fn gather(&self, step: &Step, rank: usize) -> Result<(), DcpError> {
        let Rank { stream, mailbox, gather, read, .. } = &self.ranks[rank];
        let buffers = &step.buffers[rank];
        let out = self.spec.copy.then(|| buffers.copied.as_view());
        gather.launch(stream, mailbox, &GatherStep { tokens: step.tokens, out })?;
        if self.spec.copy {
            return Ok(());
        }
        let args = ReadArgs {
            out: buffers.out.ptr(),
            boxes: mailbox.memory().ptr(),
            state: mailbox.state().ptr(),
            status: mailbox.status().ptr(),
            tokens: step.tokens as u32,
        };
        Ok(read.launch(stream, LaunchConfig::new(2).overlap(true), &args)?)
    }

    /// A call on `ranks`; `late` sleeps. All publications first: ranks that share a GPU may share its launch queues.
    pub fn launch_on(&self, step: &Step, ranks: &[usize], late: Option<(usize, u32)>) -> Result<(), DcpError> {
        for &rank in ranks {
            self.send(step, rank, late.filter(|late| late.0 == rank).map_or(0, |late| late.1))?;
        }
        ranks.iter().try_for_each(|&rank| self.gather(step, rank))
    }

    pub fn launch(&self, step: &Step) {
        self.launch_on(step, &self.all(), None).unwrap();
    }

    /// Calls on one rank as a graph.
    pub fn capture(&self, steps: &[&Step], rank: usize) -> Graph {
        Graph::capture(&self.ranks[rank].stream, |_| {
            for step in steps {
                self.send(step, rank, 0).unwrap();
                self.gather(step, rank).unwrap();
            }
            Ok(())
        })
        .unwrap()
    }

    /// Every rank's verdict on the calls so far.
    pub fn check(&self) -> Vec<Result<(), DcpError>> {
        self.ranks.iter().map(|rank| rank.mailbox.check(&rank.stream)).collect()
    }

    #[track_caller]
    pub fn run(&self, step: &Step) {
        step.poison(self);
        self.launch(step);
        self.check().into_iter().for_each(|verdict| verdict.unwrap());
        step.verify(self);
        self.assert_refilled(step.tokens);
    }

    /// While nothing runs: everything but the `tokens` of the last call's box is sentinels.
    #[track_caller]
    pub fn assert_refilled(&self, tokens: usize) {
        let shape = self.spec.shape;
        for (at, Rank { stream, mailbox, .. }) in self.ranks.iter().enumerate() {
            let last = mailbox.state().copy_to_vec(stream).unwrap()[BOX as usize] as usize;
            let words = mailbox.memory().copy_to_vec(stream).unwrap();
            for (index, words) in words.chunks(shape.box_bytes() / 8).enumerate() {
                let live = if index == last { tokens * shape.token_bytes() / 8 } else { 0 };
                let stale = words[live..].iter().position(|word| *word != u64::MAX);
                assert_eq!(stale, None, "rank {at}, box {index}, from word {live} on");
            }
        }
    }

    pub fn reset(&self) {
        let results = as_every_rank(self.ranks.len(), |rank| {
            let Rank { stream, mailbox, .. } = &self.ranks[rank];
            mailbox.reset(stream)
        });
        results.into_iter().for_each(|result| result.unwrap());
    }

    /// Every rank's call number.
    pub fn calls(&self) -> Vec<u32> {
        let number = |rank: &Rank| rank.mailbox.state().copy_to_vec(&rank.stream).unwrap()[CALL as usize];
        self.ranks.iter().map(number).collect()
    }

    /// Lets every rank's calls start after this number.
    pub fn set_calls(&self, call: u32) {
        for rank in &self.ranks {
            let mut state = [0; STATE_WORDS];
            state[CALL as usize] = call;
            rank.mailbox.state().copy_from(&rank.stream, &state).unwrap();
        }
    }

    /// Whether `rank`'s rows that nobody publishes are sentinels.
    pub fn padding_is_untouched(&self, rank: usize) -> bool {
        let Rank { stream, mailbox, .. } = &self.ranks[rank];
        let shape = self.spec.shape;
        let words = mailbox.memory().copy_to_vec(stream).unwrap();
        let published = shape.published() * shape.row_bytes() / 8;
        words.chunks(shape.token_bytes() / 8).all(|token| token[published..].iter().all(|word| *word == u64::MAX))
    }
}

struct Buffers {
    rows: Buffer<u32>,
    out: Buffer<u32>,
    copied: Buffer<u32>,
}

/// The rows of a call on all ranks.
pub struct Step {
    pub tokens: usize,
    spec: Spec,
    /// Per rank `[tokens, heads, row words]`.
    rows: Vec<Vec<u32>>,
    buffers: Vec<Buffers>,
}

/// Rows without a sentinel: small numbers, zeros, and words that are nearly one.
fn random_rows(seed: u64, words: usize) -> Vec<u32> {
    let mut rng = SplitMix64::new(seed);
    let near = [0u32, SENTINEL - 1, 0x7FFF_7FFF, 0xFFFF_0000, 0x0000_FFFF, 0xFFFF_FF7F, 0x7FFF_FFFF];
    (0..words)
        .map(|_| match rng.below(8) {
            7 => rng.next_u64() as u32 & 0x7FFF_FFFF,
            n => near[n],
        })
        .collect()
}

impl Step {
    pub fn new(group: &Group, seed: u64, tokens: usize) -> Step {
        let spec = group.spec;
        let shape = spec.shape;
        let own = tokens * shape.heads() * spec.row_words();
        let all = tokens * shape.published() * spec.row_words();
        let rows: Vec<Vec<u32>> = (0..shape.ranks()).map(|rank| random_rows(seed * 64 + rank as u64, own)).collect();
        let buffers = group.ranks.iter().zip(&rows).map(|(rank, rows)| Buffers {
            rows: rank.device.upload(rows).unwrap(),
            out: rank.device.alloc(all).unwrap(),
            copied: rank.device.alloc(tokens * shape.token_bytes() / 4).unwrap(),
        });
        let step = Step { tokens, spec, buffers: buffers.collect(), rows };
        step.poison(group);
        step
    }

    /// Other rows in the same place.
    pub fn replace(&mut self, group: &Group, seed: u64) {
        for (at, (rank, buffers)) in group.ranks.iter().zip(&self.buffers).enumerate() {
            self.rows[at] = random_rows(seed * 64 + at as u64, self.rows[at].len());
            buffers.rows.copy_from(&rank.stream, &self.rows[at]).unwrap();
        }
    }

    pub fn poison(&self, group: &Group) {
        for (rank, buffers) in group.ranks.iter().zip(&self.buffers) {
            buffers.out.fill_bytes(&rank.stream, POISON as u8).unwrap();
            buffers.copied.fill_bytes(&rank.stream, POISON as u8).unwrap();
        }
    }

    /// Of what `rank` copied: which published rows hold sentinels only.
    pub fn missing(&self, group: &Group, rank: usize) -> Vec<bool> {
        let (shape, words) = (self.spec.shape, self.spec.row_words());
        let copied = self.buffers[rank].copied.copy_to_vec(&group.ranks[rank].stream).unwrap();
        let tokens = copied.chunks(shape.q_heads() * words);
        let rows = tokens.flat_map(|token| token.chunks(words).take(shape.published()));
        rows.map(|row| row.iter().all(|word| *word == SENTINEL)).collect()
    }

    /// Word `word` of published row `row` of `token`.
    fn expected(&self, token: usize, row: usize, word: usize) -> u32 {
        let (heads, words) = (self.spec.shape.heads(), self.spec.row_words());
        self.rows[row / heads][(token * heads + row % heads) * words + word]
    }

    /// The first difference between what was read on a rank, in place or copied, and what was published.
    pub fn difference(&self, group: &Group, rank: usize) -> Result<(), String> {
        let (shape, words) = (self.spec.shape, self.spec.row_words());
        let (Rank { stream, .. }, buffers) = (&group.ranks[rank], &self.buffers[rank]);
        let (out, copied) = (buffers.out.copy_to_vec(stream).unwrap(), buffers.copied.copy_to_vec(stream).unwrap());
        for (token, row, word) in
            (0..self.tokens).flat_map(|t| (0..shape.q_heads()).flat_map(move |r| (0..words).map(move |w| (t, r, w))))
        {
            let published = row < shape.published();
            let copy = copied[(token * shape.q_heads() + row) * words + word];
            let want_copy = if published && self.spec.copy { self.expected(token, row, word) } else { POISON };
            let place = || format!("rank {rank}, token {token}, row {row}, word {word}");
            if copy != want_copy {
                return Err(format!("{}: copied {copy:08x}, want {want_copy:08x}", place()));
            }
            if published && !self.spec.copy {
                let got = out[(token * shape.published() + row) * words + word];
                let want = self.expected(token, row, word);
                if got != want {
                    return Err(format!("{}: {got:08x}, want {want:08x}", place()));
                }
            }
        }
        Ok(())
    }

    #[track_caller]
    pub fn verify(&self, group: &Group) {
        for rank in group.all() {
            if let Err(difference) = self.difference(group, rank) {
                panic!("{difference}\n{:?}", self.spec);
            }
        }
    }
}

/// Runs `body` on simulated devices in fixed orders and in `seeds` random ones, and on the GPUs here if there are any and `spec`
/// needs no multicast address: rank `r` on GPU `r % GPUs`, each with its own stream and memory.
pub fn everywhere(spec: &Spec, seeds: usize, body: impl Fn(&Group)) {
    let early = SimConfig { timing: ptx_sim::Timing::Early, ..SimConfig::default() };
    for config in [sim_config(), early].into_iter().chain((1..=seeds as u64).map(SimConfig::seeded)) {
        body(&Group::simulated(spec, config));
    }
    if spec.multicast {
        return;
    }
    // One group at a time: ranks of several could queue behind each other.
    static ALONE: Mutex<()> = Mutex::new(());
    let _alone = ALONE.lock();
    match gpus() {
        Ok(gpus) => {
            let devices: Vec<_> = gpus.iter().cycle().take(spec.shape.ranks()).cloned().collect();
            body(&Group::new(spec, &devices, None, None));
        }
        Err(error) => println!("SKIPPED: no CUDA device ({error})"),
    }
}
