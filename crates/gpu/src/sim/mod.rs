//! The simulated backend: devices of one `ptx-sim` machine.
//!
//! The machine runs when something waits for it, and then runs everything enqueued so far on every stream of every
//! device. So launches that wait for each other must all be enqueued before anything waits for one of them; a real
//! device would start the first at once.

mod capture;
mod device;
mod stream;

pub(crate) use capture::{Capture, Graph};
pub(crate) use device::Device;
pub(crate) use stream::{Event, Stream};
