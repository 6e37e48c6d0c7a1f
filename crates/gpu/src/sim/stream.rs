//! Simulated streams and events.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::{Mutex, MutexGuard};
use ptx::{ArgBuffer, KernelIr};
use ptx_sim::{Command, DeviceId, EventId, Launch, StreamId};

use super::capture::Recording;
use super::device::{Device, NEVER, State, memory_error};
use crate::error::Error;
use crate::function::LaunchConfig;

/// A stream of a simulated device. Locks are taken in the order event, capture, machine.
pub(crate) struct Stream {
    device: Arc<Device>,
    id: StreamId,
    /// The run that will execute the last enqueued command; [`NEVER`] if none was ever enqueued.
    enqueued_before: AtomicU64,
    /// The capture that the stream takes part in, if it is still open, and its number there.
    capture: Mutex<Option<(Arc<Recording>, usize)>>,
}

impl Stream {
    pub(crate) fn new(device: &Arc<Device>) -> Result<Stream, Error> {
        let id = device.machine().lock()?.machine.create_stream(device.id());
        Ok(Stream { device: device.clone(), id, enqueued_before: AtomicU64::new(NEVER), capture: Mutex::default() })
    }

    pub(super) fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Where the machine enqueues what this stream gets.
    pub(super) fn target(&self) -> (DeviceId, StreamId) {
        (self.device.id(), self.id)
    }

    /// Puts `command` into the capture, if there is one, or into the machine.
    fn enqueue(&self, command: Command) -> Result<(), Error> {
        if let Some((recording, number)) = self.capture() {
            recording.push(number, command);
            return Ok(());
        }
        let machine = self.device.machine();
        let mut state = machine.lock()?;
        machine.enqueue(&mut state, self.target(), command)?;
        self.mark_pending(&state);
        Ok(())
    }

    /// Notes that something was enqueued on this stream.
    pub(super) fn mark_pending(&self, state: &State) {
        self.enqueued_before.store(state.runs, Ordering::Relaxed);
    }

    /// The open capture that the stream takes part in, and its number there.
    pub(crate) fn capture(&self) -> Option<(Arc<Recording>, usize)> {
        let mut capture = self.capture.lock();
        if capture.as_ref().is_some_and(|(recording, _)| !recording.is_open()) {
            *capture = None;
        }
        capture.clone()
    }

    pub(super) fn set_capture(&self, recording: Arc<Recording>, number: usize) {
        *self.capture.lock() = Some((recording, number));
    }

    pub(super) fn refuse_while_capturing(&self, what: &str) -> Result<(), Error> {
        match self.capture() {
            Some(_) => Err(Error::Capture { reason: format!("{what} is not possible while the stream is captured") }),
            None => Ok(()),
        }
    }

    /// The machine, with everything enqueued on this stream done. Other streams run only if this one has work: memory
    /// that it does not wait for may be in any state, as on a real device.
    fn drained(&self) -> Result<MutexGuard<'_, State>, Error> {
        let machine = self.device.machine();
        let mut state = machine.lock()?;
        if self.enqueued_before.load(Ordering::Relaxed) == state.runs {
            machine.run(&mut state)?;
        }
        Ok(state)
    }

    pub(crate) fn synchronize(&self) -> Result<(), Error> {
        self.refuse_while_capturing("waiting for the stream")?;
        self.drained().map(|_| ())
    }

    pub(crate) fn write(&self, address: u64, bytes: &[u8]) -> Result<(), Error> {
        self.refuse_while_capturing("copying from the host")?;
        self.drained()?.machine.write(address, bytes).map_err(memory_error)
    }

    pub(crate) fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), Error> {
        self.refuse_while_capturing("copying to the host")?;
        self.drained()?.machine.read(address, bytes).map_err(memory_error)
    }

    pub(crate) fn fill(&self, address: u64, len: u64, byte: u8) -> Result<(), Error> {
        self.enqueue(Command::Fill { address, len, byte })
    }

    pub(crate) fn copy(&self, target: u64, source: u64, len: u64) -> Result<(), Error> {
        self.enqueue(Command::Copy { dst: target, src: source, len })
    }

    pub(crate) fn launch(&self, ir: &Arc<KernelIr>, config: LaunchConfig, args: &ArgBuffer) -> Result<(), Error> {
        if config.cluster != ir.bounds.cluster && config.cluster.is_some_and(|n| n > 1) {
            let what = format!("clusters that a kernel is not built for (kernel {})", ir.name);
            return Err(Error::NotSimulated { what });
        }
        self.enqueue(Command::Launch(Launch {
            kernel: ir.clone(),
            grid: config.grid,
            shared_bytes: ir.shared_bytes,
            params: args.bytes().to_vec(),
            overlap: config.overlap,
        }))
    }

    /// Whether the event can be waited for here.
    pub(crate) fn shares_machine(&self, event: &Event) -> bool {
        self.device.shares_machine(&event.device)
    }

    /// Later work waits for `event`. A stream that waits for a captured event joins its capture.
    pub(crate) fn wait(&self, event: &Event) -> Result<(), Error> {
        let mark = event.mark.lock();
        match (&*mark, self.capture()) {
            (Mark::Captured(recording), own) => {
                let Some(recording) = recording.upgrade().filter(|r| r.is_open()) else {
                    return Err(Error::Capture { reason: "the event belongs to a capture that has ended".into() });
                };
                let number = match own {
                    Some((own, number)) if Arc::ptr_eq(&own, &recording) => number,
                    Some(_) => return Err(Error::Capture { reason: "two captures would merge".into() }),
                    None => {
                        let number = recording.join(self);
                        self.set_capture(recording.clone(), number);
                        number
                    }
                };
                recording.push(number, Command::Wait(event.id));
                Ok(())
            }
            (Mark::Unrecorded, None) => Ok(()),
            (Mark::Unrecorded | Mark::Recorded { .. }, Some(_)) => {
                Err(Error::Capture { reason: "a captured stream cannot wait for an event outside its capture".into() })
            }
            (Mark::Recorded { .. }, None) => self.enqueue(Command::Wait(event.id)),
        }
    }
}

/// What an event marks.
enum Mark {
    Unrecorded,
    /// A point that is reached once run number `before` has ended.
    Recorded {
        before: u64,
    },
    /// A point in a capture.
    Captured(Weak<Recording>),
}

/// An event of a simulated device.
pub(crate) struct Event {
    device: Arc<Device>,
    id: EventId,
    mark: Mutex<Mark>,
}

impl Event {
    pub(crate) fn new(device: &Arc<Device>) -> Result<Event, Error> {
        let id = device.machine().lock()?.machine.create_event();
        Ok(Event { device: device.clone(), id, mark: Mutex::new(Mark::Unrecorded) })
    }

    pub(crate) fn record(&self, stream: &Stream) -> Result<(), Error> {
        let mut mark = self.mark.lock();
        stream.enqueue(Command::Record(self.id))?;
        *mark = match stream.capture() {
            Some((recording, _)) => Mark::Captured(Arc::downgrade(&recording)),
            None => Mark::Recorded { before: self.device.machine().lock()?.runs },
        };
        Ok(())
    }

    /// Runs the machine if the marked work has not run yet.
    pub(crate) fn synchronize(&self) -> Result<(), Error> {
        let machine = self.device.machine();
        let mark = self.mark.lock();
        let mut state = machine.lock()?;
        match &*mark {
            Mark::Recorded { before } if *before == state.runs => machine.run(&mut state),
            Mark::Recorded { .. } | Mark::Unrecorded => Ok(()),
            Mark::Captured(_) => Err(Error::Capture { reason: "waiting for a captured event".into() }),
        }
    }
}
