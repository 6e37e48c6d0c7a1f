//! Simulated capture: commands are recorded, then enqueued again on every replay.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use ptx_sim::{Command, DeviceId, EventId, StreamId};

use super::stream::Stream;
use crate::error::Error;
use crate::graph::GraphInfo;

/// The commands of a capture in progress, in the order they were enqueued.
pub(crate) struct Recording(Mutex<RecordingState>);

struct RecordingState {
    open: bool,
    /// Devices of the streams that take part; number 0 is the captured stream.
    streams: Vec<DeviceId>,
    commands: Vec<(usize, Command)>,
}

impl Recording {
    fn new(root: &Stream) -> Arc<Recording> {
        let streams = vec![root.device().id()];
        Arc::new(Recording(Mutex::new(RecordingState { open: true, streams, commands: Vec::new() })))
    }

    pub(super) fn is_open(&self) -> bool {
        self.0.lock().open
    }

    pub(super) fn push(&self, stream: usize, command: Command) {
        self.0.lock().commands.push((stream, command));
    }

    /// Adds a stream and returns its number.
    pub(super) fn join(&self, stream: &Stream) -> usize {
        let mut state = self.0.lock();
        state.streams.push(stream.device().id());
        state.streams.len() - 1
    }

    /// Ends the recording; streams that took part find it closed.
    fn close(&self) -> (Vec<DeviceId>, Vec<(usize, Command)>) {
        let mut state = self.0.lock();
        state.open = false;
        (std::mem::take(&mut state.streams), std::mem::take(&mut state.commands))
    }
}

/// A capture in progress; dropping it abandons what was captured.
pub(crate) struct Capture<'a> {
    stream: &'a Stream,
    recording: Arc<Recording>,
}

impl<'a> Capture<'a> {
    pub(crate) fn begin(stream: &'a Stream) -> Result<Capture<'a>, Error> {
        stream.refuse_while_capturing("starting a second capture")?;
        // A lost machine refuses here, as a lost context does.
        drop(stream.device().machine().lock()?);
        let recording = Recording::new(stream);
        stream.set_capture(recording.clone(), 0);
        Ok(Capture { stream, recording })
    }

    /// Ends the capture and makes it launchable.
    pub(crate) fn end(self) -> Result<Graph, Error> {
        let (devices, commands) = self.recording.close();
        check_joined(devices.len(), &commands)?;
        let info = info(&commands);
        let mut state = self.stream.device().machine().lock()?;
        // Streams and events of the graph's own, so that replays do not disturb what the captured ones do meanwhile.
        let forks = devices[1..].iter().map(|device| (*device, state.machine.create_stream(*device))).collect();
        let mut own: HashMap<EventId, EventId> = HashMap::new();
        let commands = commands
            .into_iter()
            .map(|(stream, command)| {
                let mut renamed = |id| *own.entry(id).or_insert_with(|| state.machine.create_event());
                let command = match command {
                    Command::Record(id) => Command::Record(renamed(id)),
                    Command::Wait(id) => Command::Wait(renamed(id)),
                    other => other,
                };
                (stream, command)
            })
            .collect();
        Ok(Graph { forks, commands, info })
    }
}

impl Drop for Capture<'_> {
    fn drop(&mut self) {
        self.recording.close();
    }
}

/// Every stream that joined must have been waited for since its last command, as CUDA demands.
fn check_joined(streams: usize, commands: &[(usize, Command)]) -> Result<(), Error> {
    for stream in 1..streams {
        let last = commands.iter().rposition(|(s, _)| *s == stream);
        let joined = match last.map(|at| (at, &commands[at].1)) {
            Some((at, Command::Record(id))) => {
                commands[at..].iter().any(|(s, c)| *s != stream && matches!(c, Command::Wait(waited) if waited == id))
            }
            _ => false,
        };
        if !joined {
            let reason = format!("stream {stream} joined the capture, but nothing waits for its end");
            return Err(Error::Capture { reason });
        }
    }
    Ok(())
}

fn info(commands: &[(usize, Command)]) -> GraphInfo {
    let mut info = GraphInfo::default();
    let mut last_is_launch: HashMap<usize, bool> = HashMap::new();
    for (stream, command) in commands {
        match command {
            Command::Record(_) => continue,
            Command::Wait(_) => {
                info.edges += 1;
                continue;
            }
            Command::Launch(_) | Command::Write { .. } | Command::Fill { .. } | Command::Copy { .. } => info.nodes += 1,
        }
        let launch = match command {
            Command::Launch(launch) => Some(launch.overlap),
            _ => None,
        };
        if let Some(after_launch) = last_is_launch.insert(*stream, launch.is_some()) {
            info.edges += 1;
            info.programmatic_edges += (after_launch && launch == Some(true)) as usize;
        }
    }
    info
}

/// A recorded sequence.
pub(crate) struct Graph {
    /// Streams of the graph's own, for what joined the captured stream.
    forks: Vec<(DeviceId, StreamId)>,
    commands: Vec<(usize, Command)>,
    pub(crate) info: GraphInfo,
}

impl Graph {
    /// Enqueues one replay.
    pub(crate) fn launch(&self, stream: &Stream) -> Result<(), Error> {
        if stream.capture().is_some() {
            return Err(Error::NotSimulated { what: "a graph inside a capture".into() });
        }
        let machine = stream.device().machine();
        let mut state = machine.lock()?;
        for (number, command) in &self.commands {
            let target = if *number == 0 { stream.target() } else { self.forks[number - 1] };
            machine.enqueue(&mut state, target, command.clone())?;
        }
        stream.mark_pending(&state);
        Ok(())
    }
}
