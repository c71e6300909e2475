//! What the suite must know about a device.

use std::sync::Arc;

use forebay_engine::internals::experts::Device;
use forebay_engine::{Options, Precision, Result};

use crate::models::options;

/// A device under test. The type has no values; it says how to open devices.
pub trait TestDevice {
    /// The device itself.
    type Device: Device + 'static;

    /// How far the logits of long conversations may be from exact ones, because of how the device computes attention.
    /// Weights are F32.
    const ATTENTION: f64;

    /// How far a prompt's linear attention, which may be computed in chunks, may be from the CPU's, which computes
    /// token by token.
    const RECURRENCE: f64;

    /// Whether this machine has such a device. If not, calls [`skipped`](forebay_testing::skipped) with the reason.
    fn is_there() -> bool;

    /// Whether the device is emulated and thousands of times slower. Some tests then do less.
    fn is_emulated() -> bool {
        false
    }

    /// Opens the device, with this much of its memory; by default, all that is free.
    ///
    /// # Errors
    /// If it cannot be used.
    fn open(memory: Option<u64>) -> Result<Self::Device>;
}

/// A device with its own memory, which it counts.
pub trait CountingDevice: TestDevice {
    /// The bytes in use, by purpose, of the memory that the device was [opened](TestDevice::open) with. A purpose may
    /// occur several times.
    fn used(device: &Self::Device) -> Vec<(Use, u64)>;
}

/// What a device's memory is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    /// Weights other than those of routed experts.
    Dense,
    /// Slots for routed experts.
    Experts,
    /// Activations, and everything else that only a batch needs.
    Scratch,
    /// Another purpose, as the device names it.
    Other(&'static str),
}

/// A device that can be made to fail.
pub trait FaultyDevice: TestDevice {
    /// Controls its failures.
    type Faults: Faults;

    /// Starts controlling failures, for one test at a time, because failures affect every device of the process. If the
    /// device cannot be made to fail, calls [`skipped`](forebay_testing::skipped) and returns `None`.
    fn faults() -> Option<Self::Faults>;

    /// Words that the error of this failure contains, in addition to those of every device's errors.
    fn words(fault: Fault) -> &'static [&'static str];
}

/// What can fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Allocating device memory.
    Allocation,
    /// A copy from or to the device.
    Copy,
    /// Starting a kernel.
    Launch,
    /// The device is lost when a kernel starts. Everything fails from then on.
    Lost,
}

/// Makes a device fail. When it is dropped, failures end.
pub trait Faults {
    /// Makes the `after`-th such call from now fail.
    fn fail(&self, fault: Fault, after: usize);

    /// Ends all failures, and restores a lost device.
    fn repair(&self);

    /// Bytes of the device's memory in use, of all programs and lost devices. [`peak`](Self::peak) starts anew.
    fn in_use(&self) -> u64;

    /// The most bytes in use since this or [`in_use`](Self::in_use) was last called.
    fn peak(&self) -> u64;
}

/// What errors say if a larger memory limit of the device would help.
pub(crate) const MEMORY_LIMIT: &str = "the device's memory limit";

/// How every device's errors refer to running on the CPU.
pub(crate) const WITHOUT: &str = "Options::device = None";

/// Runs a test if the machine has the device.
pub fn run<D: TestDevice>(test: fn()) {
    if D::is_there() {
        test();
    }
}

/// Runs a test if the device can be made to fail.
pub fn run_failing<D: FaultyDevice>(test: fn(&D::Faults)) {
    if let Some(faults) = D::faults() {
        test(&faults);
    }
}

/// Opens a device with this much memory.
pub(crate) fn open<D: TestDevice>(memory: Option<u64>) -> Arc<D::Device> {
    Arc::new(D::open(memory).unwrap())
}

/// Options that compute on an open device.
pub(crate) fn with(device: Arc<impl Device + 'static>, precision: Precision) -> Options {
    options(precision).device(Some(device))
}

/// Options that compute on the device with all memory that is free.
pub(crate) fn on<D: TestDevice>(precision: Precision) -> Options {
    with(open::<D>(None), precision)
}

/// `all`, or `emulated` if the device is emulated.
pub(crate) fn at_most<D: TestDevice>(all: usize, emulated: usize) -> usize {
    if D::is_emulated() { emulated } else { all }
}
