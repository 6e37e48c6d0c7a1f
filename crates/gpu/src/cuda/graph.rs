//! Stream capture and graph replay.

use std::sync::Arc;

use cudarc::driver::sys::{self, CUstreamCaptureMode};

use super::context::Context;
use super::stream::{Raw, Stream};
use crate::error::Error;
use crate::graph::GraphInfo;

/// A capture in progress; dropping it abandons what was captured.
pub(crate) struct Capture<'a> {
    stream: &'a Stream,
    open: bool,
}

impl<'a> Capture<'a> {
    /// Starts capturing. Thread-local mode: what this thread does is checked, other threads go on undisturbed.
    pub(crate) fn begin(stream: &'a Stream) -> Result<Capture<'a>, Error> {
        stream.refuse_while_capturing("starting a second capture")?;
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the context is bound by the check above and the stream is alive.
        let begun = unsafe { sys::cuStreamBeginCapture_v2(stream.raw(), mode) };
        stream.context().check("cuStreamBeginCapture", begun)?;
        Ok(Capture { stream, open: true })
    }

    /// Ends the capture and makes it launchable at once, code and memory resident.
    pub(crate) fn end(mut self, name: &str) -> Result<Graph, Error> {
        self.open = false;
        let context = self.stream.context();
        context.bind()?;
        let mut graph = std::ptr::null_mut();
        // SAFETY: the context is bound, the stream is alive and capturing, `graph` outlives the call.
        context.check("cuStreamEndCapture", unsafe { sys::cuStreamEndCapture(self.stream.raw(), &mut graph) })?;
        let template = Template { context, graph };
        let info = template.info()?;
        let mut exec = std::ptr::null_mut();
        // SAFETY: the context is bound, `graph` was captured above and `exec` outlives the call.
        let made = unsafe { sys::cuGraphInstantiateWithFlags(&mut exec, graph, 0) };
        context.check("cuGraphInstantiate", made)?;
        let graph = Graph { context: context.clone(), exec: Raw(exec), id: context.register_name(name), info };
        // SAFETY: the context is bound, graph and stream are alive; uploading runs nothing.
        context.check("cuGraphUpload", unsafe { sys::cuGraphUpload(exec, self.stream.raw()) })?;
        Ok(graph)
    }
}

impl Drop for Capture<'_> {
    fn drop(&mut self) {
        if !self.open || self.stream.context().bind().is_err() {
            return;
        }
        let mut graph = std::ptr::null_mut();
        // SAFETY: the context is bound, the stream is alive and capturing (or its capture is invalid, which this
        // call clears), `graph` outlives the call.
        let ended = unsafe { sys::cuStreamEndCapture(self.stream.raw(), &mut graph) };
        if ended == sys::CUresult::CUDA_SUCCESS && !graph.is_null() {
            drop(Template { context: self.stream.context(), graph });
        }
    }
}

/// A captured graph before instantiation.
struct Template<'a> {
    context: &'a Arc<Context>,
    graph: sys::CUgraph,
}

impl Template<'_> {
    fn info(&self) -> Result<GraphInfo, Error> {
        let mut nodes = 0;
        // SAFETY: the graph is alive; a null array asks for the count, which outlives the call.
        let asked = unsafe { sys::cuGraphGetNodes(self.graph, std::ptr::null_mut(), &mut nodes) };
        self.context.check("cuGraphGetNodes", asked)?;
        let null = std::ptr::null_mut();
        let mut edges = 0;
        // SAFETY: the graph is alive; null arrays ask for the count, which outlives the call.
        let asked = unsafe {
            sys::cuGraphGetEdges_v2(self.graph, null, std::ptr::null_mut(), std::ptr::null_mut(), &mut edges)
        };
        self.context.check("cuGraphGetEdges", asked)?;
        if edges == 0 {
            return Ok(GraphInfo { nodes, edges: 0, programmatic_edges: 0 });
        }
        let mut from = vec![std::ptr::null_mut(); edges];
        let mut to = vec![std::ptr::null_mut(); edges];
        let plain = sys::CUgraphEdgeData { from_port: 0, to_port: 0, type_: 0, reserved: [0; 5] };
        let mut data = vec![plain; edges];
        // SAFETY: the graph is alive; the three arrays hold `edges` entries, as stated, and outlive the call.
        let asked = unsafe {
            sys::cuGraphGetEdges_v2(self.graph, from.as_mut_ptr(), to.as_mut_ptr(), data.as_mut_ptr(), &mut edges)
        };
        self.context.check("cuGraphGetEdges", asked)?;
        let programmatic = sys::CUgraphDependencyType::CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC as u8;
        let programmatic_edges = data.iter().filter(|e| e.type_ == programmatic).count();
        Ok(GraphInfo { nodes, edges, programmatic_edges })
    }
}

impl Drop for Template<'_> {
    fn drop(&mut self) {
        // SAFETY: made by ending a capture and owned here; executable graphs made from it are independent.
        let _ = unsafe { sys::cuGraphDestroy(self.graph) };
    }
}

/// An executable graph.
pub(crate) struct Graph {
    context: Arc<Context>,
    exec: Raw<sys::CUgraphExec>,
    id: u32,
    pub(crate) info: GraphInfo,
}

impl Graph {
    /// Enqueues one replay on a stream of the same context.
    pub(crate) fn launch(&self, stream: &Stream) -> Result<(), Error> {
        self.context.bind()?;
        // SAFETY: the context is bound; graph and stream are alive and of this context (checked by the caller).
        let launched = unsafe { sys::cuGraphLaunch(self.exec.0, stream.raw()) };
        self.context.check("cuGraphLaunch", launched)?;
        self.context.note_launch(stream.launches(), self.id);
        Ok(())
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: owned here; replays already enqueued complete. A failure (after a fault) is nobody's to handle.
            let _ = unsafe { sys::cuGraphExecDestroy(self.exec.0) };
        }
    }
}
