//! Streams and events.

use std::sync::Arc;

use cudarc::driver::CudaStream;
use cudarc::driver::sys::{self, CUresult};

use super::context::{Context, Launches};
use super::driver;
use crate::error::Error;

/// A driver handle that may cross threads.
#[derive(Clone, Copy)]
pub(crate) struct Raw<T>(pub(super) T);

// SAFETY: the driver's functions may be called from any thread with any handle, given a bound context, which every
// caller in this module sees to; the handle itself is an opaque number.
unsafe impl<T> Send for Raw<T> {}
// SAFETY: as above; sharing a handle shares no memory of this process.
unsafe impl<T> Sync for Raw<T> {}

/// Who destroys a stream.
enum Owner {
    Own,
    Bindings { _stream: Arc<CudaStream> },
    Caller,
}

/// A CUDA stream.
pub(crate) struct Stream {
    context: Arc<Context>,
    raw: Raw<sys::CUstream>,
    owner: Owner,
    launches: Arc<Launches>,
}

impl Stream {
    /// A new stream that does not synchronise with the legacy default stream.
    pub(crate) fn new(context: &Arc<Context>) -> Result<Stream, Error> {
        context.bind()?;
        let mut raw = std::ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the context is bound and `raw` outlives the call.
        context.check("cuStreamCreate", unsafe { sys::cuStreamCreate(&mut raw, flags) })?;
        Ok(Stream::with_owner(context, raw, Owner::Own))
    }

    /// A stream of the bindings, kept alive.
    pub(crate) fn from_bindings(context: &Arc<Context>, stream: Arc<CudaStream>) -> Stream {
        Stream::with_owner(context, stream.cu_stream(), Owner::Bindings { _stream: stream })
    }

    /// A foreign stream; the caller keeps it alive and of this context.
    pub(crate) fn from_raw(context: &Arc<Context>, raw: sys::CUstream) -> Stream {
        Stream::with_owner(context, raw, Owner::Caller)
    }

    fn with_owner(context: &Arc<Context>, raw: sys::CUstream, owner: Owner) -> Stream {
        let launches = context.register_stream();
        Stream { context: context.clone(), raw: Raw(raw), owner, launches }
    }

    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    pub(crate) fn raw(&self) -> sys::CUstream {
        self.raw.0
    }

    pub(super) fn launches(&self) -> &Launches {
        &self.launches
    }

    /// Waits for everything enqueued so far.
    pub(crate) fn synchronize(&self) -> Result<(), Error> {
        self.refuse_while_capturing("waiting for the stream")?;
        // SAFETY: the context is bound by the check above and the stream is alive.
        self.context.check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(self.raw()) })?;
        self.launches.finished();
        Ok(())
    }

    /// Whether everything enqueued so far has finished.
    pub(crate) fn is_idle(&self) -> Result<bool, Error> {
        self.refuse_while_capturing("querying the stream")?;
        // SAFETY: the context is bound by the check above and the stream is alive.
        match unsafe { sys::cuStreamQuery(self.raw()) } {
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            result => self.context.check("cuStreamQuery", result).map(|()| true),
        }
    }

    /// Whether work is captured instead of run. Binds the context.
    pub(crate) fn is_capturing(&self) -> Result<bool, Error> {
        self.context.bind()?;
        let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: the context is bound, the stream is alive and `status` outlives the call.
        let asked = unsafe { sys::cuStreamIsCapturing(self.raw(), &mut status) };
        self.context.check("cuStreamIsCapturing", asked)?;
        Ok(status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
    }

    /// Binds the context and refuses what would break a capture in progress, before the driver invalidates it.
    pub(super) fn refuse_while_capturing(&self, what: &str) -> Result<(), Error> {
        if self.is_capturing()? {
            return Err(Error::Capture { reason: format!("{what} is not possible while the stream is captured") });
        }
        Ok(())
    }

    /// Later work waits for `event`.
    pub(crate) fn wait(&self, event: &Event) -> Result<(), Error> {
        self.context.bind()?;
        // SAFETY: the context is bound, stream and event are alive, flags 0 is the default.
        self.context.check("cuStreamWaitEvent", unsafe { sys::cuStreamWaitEvent(self.raw(), event.raw.0, 0) })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if matches!(self.owner, Owner::Own) && self.context.bind().is_ok() {
            // SAFETY: made by `new` and used by nobody else any more; enqueued work still completes. A failure (after
            // a fault) is nobody's to handle.
            let _ = unsafe { sys::cuStreamDestroy_v2(self.raw()) };
        }
    }
}

/// A CUDA event with timing.
pub(crate) struct Event {
    context: Arc<Context>,
    raw: Raw<sys::CUevent>,
}

impl Event {
    pub(crate) fn new(context: &Arc<Context>) -> Result<Event, Error> {
        context.bind()?;
        let mut raw = std::ptr::null_mut();
        let flags = sys::CUevent_flags::CU_EVENT_DEFAULT as u32;
        // SAFETY: the context is bound and `raw` outlives the call.
        context.check("cuEventCreate", unsafe { sys::cuEventCreate(&mut raw, flags) })?;
        Ok(Event { context: context.clone(), raw: Raw(raw) })
    }

    /// Marks the current end of `stream`, a stream of the same context.
    pub(crate) fn record(&self, stream: &Stream) -> Result<(), Error> {
        self.context.bind()?;
        // SAFETY: the context is bound; event and stream are alive and of this context (checked by the caller).
        self.context.check("cuEventRecord", unsafe { sys::cuEventRecord(self.raw.0, stream.raw()) })
    }

    /// Waits until the recorded work has finished.
    pub(crate) fn synchronize(&self) -> Result<(), Error> {
        self.context.bind()?;
        // SAFETY: the context is bound and the event is alive.
        self.context.check("cuEventSynchronize", unsafe { sys::cuEventSynchronize(self.raw.0) })
    }

    /// Whether the recorded work has finished.
    pub(crate) fn is_complete(&self) -> Result<bool, Error> {
        self.context.bind()?;
        // SAFETY: the context is bound and the event is alive.
        match unsafe { sys::cuEventQuery(self.raw.0) } {
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            result => self.context.check("cuEventQuery", result).map(|()| true),
        }
    }

    /// Milliseconds from this event to `end`, both recorded and complete.
    pub(crate) fn elapsed_ms(&self, end: &Event) -> Result<f32, Error> {
        self.context.bind()?;
        let mut ms = 0.0;
        // SAFETY: the context is bound, both events are alive and `ms` outlives the call.
        let asked = unsafe { driver::event_elapsed_time(&mut ms, self.raw.0, end.raw.0) };
        self.context.check("cuEventElapsedTime", asked).map(|()| ms)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: made by `new` and used by nobody else any more. A failure is nobody's to handle.
            let _ = unsafe { sys::cuEventDestroy_v2(self.raw.0) };
        }
    }
}
