//! How long each kernel takes, for those who make them faster.
//!
//! While it is on, kernels are started one by one and not as graphs, each when the one before has ended.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use cudarc::driver::sys::CUevent_flags;
use cudarc::driver::{DriverError, result, sys};

/// Kernels that are started before the first of them runs. More would not be taken while that one waits.
const TOGETHER: usize = 100;

static ON: AtomicBool = AtomicBool::new(false);

/// By name: how often, and for how many microseconds in all.
static TIMES: Mutex<Option<HashMap<&'static str, (usize, f64)>>> = Mutex::new(None);

/// The names of kernels by their handles.
static NAMES: Mutex<Option<HashMap<u64, &'static str>>> = Mutex::new(None);

/// What one kernel took.
#[derive(Clone, Copy, Debug)]
pub struct Line {
    /// The kernel.
    pub name: &'static str,
    /// How often it ran.
    pub count: usize,
    /// Microseconds in all.
    pub micros: f64,
}

/// Starts to take times.
pub fn start() {
    *TIMES.lock().unwrap_or_else(PoisonError::into_inner) = Some(HashMap::new());
    ON.store(true, Ordering::Relaxed);
}

/// What was taken since the start, the longest first. No more are taken.
pub fn stop() -> Vec<Line> {
    ON.store(false, Ordering::Relaxed);
    let times = TIMES.lock().unwrap_or_else(PoisonError::into_inner).take().unwrap_or_default();
    let line = |(name, (count, micros))| Line { name, count, micros };
    let mut lines: Vec<Line> = times.into_iter().map(line).collect();
    lines.sort_by(|a, b| b.micros.total_cmp(&a.micros));
    lines
}

pub(crate) fn is_on() -> bool {
    ON.load(Ordering::Relaxed)
}

/// Remembers what a kernel is called.
pub(crate) fn name(kernel: sys::CUfunction, name: &'static str) {
    let mut names = NAMES.lock().unwrap_or_else(PoisonError::into_inner);
    names.get_or_insert_default().insert(kernel as u64, name);
}

/// Keeps the stream waiting until everything has been started, so that no kernel waits for the host.
unsafe extern "C" fn wait_for_gate(gate: *mut c_void) {
    // SAFETY: the gate lives until the stream has come past this.
    let gate = unsafe { &*gate.cast::<AtomicBool>() };
    while !gate.load(Ordering::Acquire) {
        std::thread::yield_now();
    }
}

/// Starts kernels by `launch`, and takes the time of each.
pub(crate) fn time(
    kernels: &[(sys::CUfunction, &[u64])],
    stream: sys::CUstream,
    mut launch: impl FnMut(&[u64]) -> Result<(), DriverError>,
) -> Result<(), DriverError> {
    for some in kernels.chunks(TOGETHER) {
        let flags = CUevent_flags::CU_EVENT_DEFAULT;
        let events: Vec<_> =
            (0..=some.len()).map(|_| result::event::create(flags)).collect::<Result<_, _>>()?;
        let gate = AtomicBool::new(false);
        // SAFETY: the stream and the events live, and so does the gate until the wait below is over, which comes in any
        // case.
        let times = unsafe {
            let closed =
                sys::cuLaunchHostFunc(stream, Some(wait_for_gate), (&raw const gate).cast_mut().cast());
            let started =
                closed.result().and_then(|()| result::event::record(events[0], stream)).and_then(|()| {
                    some.iter().zip(&events[1..]).try_for_each(|((_, words), &event)| {
                        launch(words)?;
                        result::event::record(event, stream)
                    })
                });
            gate.store(true, Ordering::Release);
            result::stream::synchronize(stream)?;
            started?;
            events
                .windows(2)
                .map(|pair| result::event::elapsed(pair[0], pair[1]))
                .collect::<Result<Vec<f32>, _>>()
        }?;
        let names = NAMES.lock().unwrap_or_else(PoisonError::into_inner);
        let mut all = TIMES.lock().unwrap_or_else(PoisonError::into_inner);
        for ((kernel, _), millis) in some.iter().zip(times) {
            let name = names.as_ref().and_then(|names| names.get(&(*kernel as u64))).copied().unwrap_or("?");
            let line = all.get_or_insert_default().entry(name).or_default();
            *line = (line.0 + 1, line.1 + f64::from(millis) * 1e3);
        }
        for event in events {
            // SAFETY: it was created once and is destroyed once.
            unsafe { result::event::destroy(event) }?;
        }
    }
    Ok(())
}
