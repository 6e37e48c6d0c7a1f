//! Streams and events.

use std::sync::Arc;

use crate::device::{Backend, Device};
use crate::error::Error;
use crate::{cuda, graph, sim};

pub(crate) enum StreamBackend {
    Cuda(cuda::Stream),
    Sim(sim::Stream),
}

/// A queue of work: what is enqueued runs in order. Cheap to clone; all clones are the same stream.
#[derive(Clone)]
pub struct Stream {
    device: Device,
    backend: Arc<StreamBackend>,
}

impl std::fmt::Debug for Stream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Stream({})", self.device.info().name)
    }
}

impl Stream {
    pub(crate) fn new(device: &Device) -> Result<Stream, Error> {
        let backend = match device.backend() {
            Backend::Cuda(context) => StreamBackend::Cuda(cuda::Stream::new(context)?),
            Backend::Sim(device) => StreamBackend::Sim(sim::Stream::new(device)?),
        };
        Ok(Stream { device: device.clone(), backend: Arc::new(backend) })
    }

    /// A stream of the bindings, kept alive by the result.
    ///
    /// # Errors
    /// [`Error::WrongDevice`] if it is of another context.
    pub fn from_cuda(device: &Device, stream: Arc<cudarc::driver::CudaStream>) -> Result<Stream, Error> {
        let owner = Device::from_cuda(stream.context().clone())?;
        device.expect_same("stream", &owner)?;
        let backend = match device.backend() {
            Backend::Cuda(context) => StreamBackend::Cuda(cuda::Stream::from_bindings(context, stream)),
            Backend::Sim(_) => unreachable!("the owner is a CUDA device, and the devices are the same"),
        };
        Ok(Stream { device: device.clone(), backend: Arc::new(backend) })
    }

    /// A stream of any other library.
    ///
    /// # Errors
    /// [`Error::WrongDevice`] on a simulated device.
    ///
    /// # Safety
    /// - `stream` is a stream of `device`'s context (the primary one unless the device was made otherwise);
    /// - it is not destroyed before the result and its clones are dropped.
    pub unsafe fn from_raw(device: &Device, stream: cudarc::driver::sys::CUstream) -> Result<Stream, Error> {
        let backend = match device.backend() {
            Backend::Cuda(context) => StreamBackend::Cuda(cuda::Stream::from_raw(context, stream)),
            Backend::Sim(_) => {
                let expected = device.info().name.clone();
                return Err(Error::WrongDevice { what: "stream", found: "CUDA".into(), expected });
            }
        };
        Ok(Stream { device: device.clone(), backend: Arc::new(backend) })
    }

    /// The stream's device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    pub(crate) fn backend(&self) -> &StreamBackend {
        &self.backend
    }

    /// The driver's handle, for other libraries; `None` on the simulator. It is valid while this stream exists.
    pub fn cuda_stream(&self) -> Option<cudarc::driver::sys::CUstream> {
        match &*self.backend {
            StreamBackend::Cuda(stream) => Some(stream.raw()),
            StreamBackend::Sim(_) => None,
        }
    }

    /// Whether what is enqueued now is captured instead of run, by [`Graph::capture`](crate::Graph::capture) or by anybody
    /// else.
    ///
    /// # Errors
    /// [`Error::Fault`] of earlier work.
    pub fn is_capturing(&self) -> Result<bool, Error> {
        match &*self.backend {
            StreamBackend::Cuda(stream) => stream.is_capturing(),
            StreamBackend::Sim(stream) => Ok(stream.capture().is_some()),
        }
    }

    /// Waits until everything enqueued so far has finished.
    ///
    /// # Errors
    /// [`Error::Fault`] if any of it failed; [`Error::Capture`] inside a capture.
    pub fn synchronize(&self) -> Result<(), Error> {
        graph::refuse_while_capturing("waiting for a stream")?;
        match &*self.backend {
            StreamBackend::Cuda(stream) => stream.synchronize(),
            StreamBackend::Sim(stream) => stream.synchronize(),
        }
    }

    /// Whether everything enqueued so far has finished. Does not wait on CUDA; the simulator runs it first.
    ///
    /// # Errors
    /// As [`Stream::synchronize`].
    pub fn is_idle(&self) -> Result<bool, Error> {
        graph::refuse_while_capturing("querying a stream")?;
        match &*self.backend {
            StreamBackend::Cuda(stream) => stream.is_idle(),
            StreamBackend::Sim(stream) => stream.synchronize().map(|()| true),
        }
    }

    /// Makes later work on this stream wait for `event`, which may be of another device's stream.
    ///
    /// # Errors
    /// What the driver reports.
    pub fn wait(&self, event: &Event) -> Result<(), Error> {
        match (&*self.backend, &event.backend) {
            (StreamBackend::Cuda(stream), EventBackend::Cuda(event)) => return stream.wait(event),
            (StreamBackend::Sim(stream), EventBackend::Sim(event)) if stream.shares_machine(event) => {
                return stream.wait(event);
            }
            (StreamBackend::Sim(_), _) | (_, EventBackend::Sim(_)) => {}
        }
        let (found, expected) = (event.device.info().name.clone(), self.device.info().name.clone());
        Err(Error::WrongDevice { what: "event", found, expected })
    }
}

enum EventBackend {
    Cuda(cuda::Event),
    Sim(sim::Event),
}

/// A point in a stream's work.
pub struct Event {
    device: Device,
    backend: EventBackend,
}

impl std::fmt::Debug for Event {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Event({})", self.device.info().name)
    }
}

impl Event {
    pub(crate) fn new(device: &Device) -> Result<Event, Error> {
        let backend = match device.backend() {
            Backend::Cuda(context) => EventBackend::Cuda(cuda::Event::new(context)?),
            Backend::Sim(device) => EventBackend::Sim(sim::Event::new(device)?),
        };
        Ok(Event { device: device.clone(), backend })
    }

    /// Marks the current end of `stream`'s work.
    ///
    /// # Errors
    /// [`Error::WrongDevice`] if the stream is of another device.
    pub fn record(&self, stream: &Stream) -> Result<(), Error> {
        self.device.expect_same("stream", stream.device())?;
        match (&self.backend, stream.backend()) {
            (EventBackend::Cuda(event), StreamBackend::Cuda(stream)) => event.record(stream),
            (EventBackend::Sim(event), StreamBackend::Sim(stream)) => event.record(stream),
            (EventBackend::Cuda(_), StreamBackend::Sim(_)) | (EventBackend::Sim(_), StreamBackend::Cuda(_)) => {
                unreachable!("one device has one backend")
            }
        }
    }

    /// Waits until the marked work has finished.
    ///
    /// # Errors
    /// [`Error::Fault`] if any of it failed; [`Error::Capture`] inside a capture.
    pub fn synchronize(&self) -> Result<(), Error> {
        graph::refuse_while_capturing("waiting for an event")?;
        match &self.backend {
            EventBackend::Cuda(event) => event.synchronize(),
            EventBackend::Sim(event) => event.synchronize(),
        }
    }

    /// Whether the marked work has finished. Does not wait on CUDA; the simulator runs it first.
    ///
    /// # Errors
    /// As [`Event::synchronize`].
    pub fn is_complete(&self) -> Result<bool, Error> {
        graph::refuse_while_capturing("querying an event")?;
        match &self.backend {
            EventBackend::Cuda(event) => event.is_complete(),
            EventBackend::Sim(event) => event.synchronize().map(|()| true),
        }
    }

    /// Milliseconds of device time from this event to `end`, both complete; `None` on the simulator, which has no clock.
    ///
    /// # Errors
    /// [`Error::WrongDevice`] for events of two devices, or what the driver reports for unrecorded ones.
    pub fn elapsed_ms(&self, end: &Event) -> Result<Option<f32>, Error> {
        self.device.expect_same("event", &end.device)?;
        match (&self.backend, &end.backend) {
            (EventBackend::Cuda(start), EventBackend::Cuda(end)) => start.elapsed_ms(end).map(Some),
            (EventBackend::Sim(_), _) | (_, EventBackend::Sim(_)) => Ok(None),
        }
    }
}
