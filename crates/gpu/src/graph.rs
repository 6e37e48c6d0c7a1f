//! Captured sequences of work.

use std::cell::RefCell;

use crate::buffer::Allocation;
use crate::device::Device;
use crate::error::Error;
use crate::stream::{Stream, StreamBackend};
use crate::{cuda, sim};

/// The shape of a captured graph.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct GraphInfo {
    /// Launches, fills and copies.
    pub nodes: usize,
    /// Dependencies between them.
    pub edges: usize,
    /// Those of them that let the later launch start early.
    pub programmatic_edges: usize,
}

enum GraphBackend {
    Cuda(cuda::Graph),
    Sim(sim::Graph),
}

/// A captured sequence of work, replayed by one call. Buffers are captured by address: their contents may change
/// between replays, and they must outlive the graph. Buffers dropped inside the captured closure live as long as it.
pub struct Graph {
    device: Device,
    backend: GraphBackend,
    // After the backend: freed once nothing can replay.
    _retained: Vec<Allocation>,
}

impl std::fmt::Debug for Graph {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Graph({:?} on {})", self.info(), self.device.info().name)
    }
}

thread_local! {
    /// Memory dropped in the capture that this thread is in; `None` outside.
    static CAPTURING: RefCell<Option<Vec<Allocation>>> = const { RefCell::new(None) };
}

/// [`Error::Capture`] if the calling thread is inside a capture.
pub(crate) fn refuse_while_capturing(what: &str) -> Result<(), Error> {
    if CAPTURING.with_borrow(Option::is_some) {
        return Err(Error::Capture { reason: format!("{what} is not possible inside a capture") });
    }
    Ok(())
}

/// Hands memory to the capture of the calling thread, or frees it at once outside of one.
pub(crate) fn retain_while_capturing(allocation: Allocation) {
    let outside = CAPTURING.try_with(|capturing| match &mut *capturing.borrow_mut() {
        Some(retained) => {
            retained.push(allocation);
            None
        }
        None => Some(allocation),
    });
    // Freed here, outside of the borrow: freeing may run arbitrary work.
    drop(outside);
}

/// Marks the thread as capturing until dropped.
struct Scope;

impl Drop for Scope {
    fn drop(&mut self) {
        // Leave the capture first, so that freeing what it retained is possible again.
        let retained = CAPTURING.take();
        drop(retained);
    }
}

/// Runs `enqueue` with the thread marked as capturing, and also returns the memory that it dropped.
fn in_scope<E>(enqueue: impl FnOnce() -> Result<(), E>) -> (Result<(), E>, Vec<Allocation>) {
    CAPTURING.set(Some(Vec::new()));
    let scope = Scope;
    let enqueued = enqueue();
    let retained = CAPTURING.take().unwrap_or_default();
    drop(scope);
    (enqueued, retained)
}

impl Graph {
    /// Captures what `enqueue` puts on `stream`, without running it. Allocating, loading, copying from or to the host
    /// and waiting are refused inside. Streams that wait for an event recorded on `stream` join the capture, and
    /// `stream` must wait for them before the end.
    ///
    /// # Errors
    /// What `enqueue` returns, or [`Error::Capture`].
    pub fn capture(stream: &Stream, enqueue: impl FnOnce(&Stream) -> Result<(), Error>) -> Result<Graph, Error> {
        Self::capture_with(stream, enqueue)
    }

    /// As [`Graph::capture`] for closures with an error type of their own.
    ///
    /// # Errors
    /// What `enqueue` returns, or [`Error::Capture`].
    pub fn capture_with<E: From<Error>>(
        stream: &Stream,
        enqueue: impl FnOnce(&Stream) -> Result<(), E>,
    ) -> Result<Graph, E> {
        refuse_while_capturing("capturing")?;
        let (backend, retained) = match stream.backend() {
            StreamBackend::Cuda(raw) => {
                let capture = cuda::Capture::begin(raw)?;
                let (enqueued, retained) = in_scope(|| enqueue(stream));
                if let Err(error) = enqueued {
                    drop(capture); // before the memory it may have recorded
                    return Err(error);
                }
                (GraphBackend::Cuda(capture.end("captured graph")?), retained)
            }
            StreamBackend::Sim(raw) => {
                let capture = sim::Capture::begin(raw)?;
                let (enqueued, retained) = in_scope(|| enqueue(stream));
                if let Err(error) = enqueued {
                    drop(capture);
                    return Err(error);
                }
                (GraphBackend::Sim(capture.end()?), retained)
            }
        };
        Ok(Graph { device: stream.device().clone(), backend, _retained: retained })
    }

    /// Enqueues one replay on `stream`, any stream of the same device.
    ///
    /// # Errors
    /// [`Error::WrongDevice`], or [`Error::Fault`] if the device was lost earlier.
    pub fn launch(&self, stream: &Stream) -> Result<(), Error> {
        self.device.expect_same("stream", stream.device())?;
        match (&self.backend, stream.backend()) {
            (GraphBackend::Cuda(graph), StreamBackend::Cuda(stream)) => graph.launch(stream),
            (GraphBackend::Sim(graph), StreamBackend::Sim(stream)) => graph.launch(stream),
            (GraphBackend::Cuda(_), StreamBackend::Sim(_)) | (GraphBackend::Sim(_), StreamBackend::Cuda(_)) => {
                unreachable!("one device has one backend")
            }
        }
    }

    /// The graph's device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The graph's shape.
    pub fn info(&self) -> GraphInfo {
        match &self.backend {
            GraphBackend::Cuda(graph) => graph.info,
            GraphBackend::Sim(graph) => graph.info,
        }
    }
}
