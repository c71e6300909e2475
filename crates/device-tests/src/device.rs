//! What the suite must be told about a device.

use std::sync::Arc;

use forebay_engine::internals::experts::Device;
use forebay_engine::{Options, Precision, Result};

use crate::models::options;

/// A device under test. The type has no values: it says how devices are opened.
pub trait TestDevice {
    /// The device itself.
    type Device: Device + 'static;

    /// How far the logits of long conversations may be from exact ones because of how the device attends. Weights are F32.
    const ATTENTION: f64;

    /// How far linear attention of a prompt, which may be computed in chunks, may be from the processor's, which goes token by token.
    const RECURRENCE: f64;

    /// Whether this machine has one. If not, it calls [`skipped`](forebay_testing::skipped) with the reason.
    fn is_there() -> bool;

    /// Whether it is emulated and takes thousands of times as long. Some tests then do less.
    fn is_emulated() -> bool {
        false
    }

    /// Opens it, with so many bytes of its memory; by default with what is free.
    ///
    /// # Errors
    /// If it cannot be used.
    fn open(memory: Option<u64>) -> Result<Self::Device>;
}

/// A device with memory of its own, which it counts.
pub trait CountingDevice: TestDevice {
    /// The bytes in use of what the device was [opened](TestDevice::open) with, by purpose. One purpose may be there several times.
    fn used(device: &Self::Device) -> Vec<(Use, u64)>;
}

/// What a device's memory is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    /// Weights that are not of routed experts.
    Dense,
    /// Slots for routed experts.
    Experts,
    /// Activations, and whatever else only a batch needs.
    Scratch,
    /// Another purpose, in the device's words.
    Other(&'static str),
}

/// A device that fails when it is asked to.
pub trait FaultyDevice: TestDevice {
    /// What makes it fail.
    type Faults: Faults;

    /// What makes it fail, for one test at a time: failures hit every device of the process. Where the device cannot be
    /// made to fail, it calls [`skipped`](forebay_testing::skipped) and gives nothing.
    fn faults() -> Option<Self::Faults>;

    /// Words of the error that a failure becomes, besides those that every device's errors have.
    fn words(fault: Fault) -> &'static [&'static str];
}

/// What can fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Taking memory of the device.
    Allocation,
    /// A copy from or to the device.
    Copy,
    /// Starting a kernel.
    Launch,
    /// The device is lost when a kernel starts, and everything fails from then on.
    Lost,
}

/// Makes a device fail. When it is dropped, nothing fails any more.
pub trait Faults {
    /// The `after`-th such call from now fails.
    fn fail(&self, fault: Fault, after: usize);

    /// Nothing fails any more, and a lost device is there again.
    fn repair(&self);

    /// Bytes of the device's memory in use, of all programs and devices that were ever lost. [`peak`](Self::peak) counts anew from here.
    fn in_use(&self) -> u64;

    /// The most bytes of the device's memory that were in use since this, or [`in_use`](Self::in_use), was last asked.
    fn peak(&self) -> u64;
}

/// What errors name that more memory of the device would prevent.
pub(crate) const MEMORY_LIMIT: &str = "the device's memory limit";

/// How every device's errors say that the processor computes without it.
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

/// A device with so many bytes of memory.
pub(crate) fn open<D: TestDevice>(memory: Option<u64>) -> Arc<D::Device> {
    Arc::new(D::open(memory).unwrap())
}

/// Options that compute on a device which is open.
pub(crate) fn with(device: Arc<impl Device + 'static>, precision: Precision) -> Options {
    options(precision).device(Some(device))
}

/// Options that compute on the device, with what memory is free.
pub(crate) fn on<D: TestDevice>(precision: Precision) -> Options {
    with(open::<D>(None), precision)
}

/// So many, or fewer where the device is emulated.
pub(crate) fn at_most<D: TestDevice>(all: usize, emulated: usize) -> usize {
    if D::is_emulated() { emulated } else { all }
}
