//! Measures the time of each kernel, for optimising them, and of the host's work.
//!
//! While profiling is on, each kernel is a pass of its own, between two timestamps.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use forebay_engine::{Error, Result};

use crate::device::Gpu;
use crate::shaders::Name;

/// The times of one kernel.
#[derive(Clone, Debug)]
pub struct Line {
    /// The kernel, and the kinds of its matrices.
    pub name: String,
    /// How often it ran.
    pub count: usize,
    /// Total microseconds.
    pub micros: f64,
}

/// What the host has spent time with since the GPU was opened.
#[derive(Clone, Copy, Debug, Default)]
pub struct HostTimes {
    /// Making command buffers.
    pub encoding: Duration,
    /// Submitting them.
    pub submitting: Duration,
    /// Waiting for the GPU.
    pub waiting: Duration,
}

/// What the host does.
#[derive(Clone, Copy)]
pub(crate) enum Work {
    Encoding,
    Submitting,
    Waiting,
}

/// The nanoseconds of each kind of work.
#[derive(Default)]
pub(crate) struct HostClock([AtomicU64; 3]);

impl HostClock {
    /// Times some work.
    pub fn time<T>(&self, work: Work, run: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let result = run();
        self.0[work as usize].fetch_add(start.elapsed().as_nanos() as u64, Ordering::Relaxed);
        result
    }

    pub fn get(&self) -> HostTimes {
        let [encoding, submitting, waiting] =
            [0, 1, 2].map(|work: usize| Duration::from_nanos(self.0[work].load(Ordering::Relaxed)));
        HostTimes { encoding, submitting, waiting }
    }
}

/// The most timestamps of a set.
const SET: usize = wgpu::QUERY_SET_MAX_QUERIES as usize;

/// The timestamps of some kernels: one before each and one after it.
pub(crate) struct Stamps {
    set: wgpu::QuerySet,
    names: Vec<String>,
}

/// Timestamps on their way to the host.
struct Resolved {
    names: Vec<String>,
    buffer: wgpu::Buffer,
}

/// What is measured while profiling is on.
#[derive(Default)]
pub(crate) struct Profile(Vec<Resolved>);

impl Stamps {
    /// Where the next kernel's times go.
    fn next(&mut self, name: String) -> wgpu::ComputePassTimestampWrites<'_> {
        let first = 2 * self.names.len() as u32;
        self.names.push(name);
        wgpu::ComputePassTimestampWrites {
            query_set: &self.set,
            beginning_of_pass_write_index: Some(first),
            end_of_pass_write_index: Some(first + 1),
        }
    }
}

/// Takes the times of the kernels of a command buffer.
#[derive(Default)]
pub(crate) struct Stopwatch(Vec<Stamps>);

impl Stopwatch {
    /// A pass for one kernel.
    pub fn pass<'a>(
        &mut self,
        gpu: &Gpu,
        encoder: &'a mut wgpu::CommandEncoder,
        name: &Name,
    ) -> wgpu::ComputePass<'a> {
        if self.0.last().is_none_or(|stamps| 2 * stamps.names.len() == SET) {
            let set = gpu.device.create_query_set(&wgpu::QuerySetDescriptor {
                label: None,
                ty: wgpu::QueryType::Timestamp,
                count: SET as u32,
            });
            self.0.push(Stamps { set, names: Vec::new() });
        }
        let stamps = self.0.last_mut().expect("it was just made");
        encoder.begin_compute_pass(&wgpu::ComputePassDescriptor {
            label: None,
            timestamp_writes: Some(stamps.next(title(name))),
        })
    }

    /// Records that the host gets the times.
    pub fn finish(self, gpu: &Gpu, encoder: &mut wgpu::CommandEncoder) {
        let mut profile = lock(gpu);
        let Some(profile) = profile.as_mut() else { return };
        for Stamps { set, names } in self.0 {
            let buffer = |usage| {
                gpu.device.create_buffer(&wgpu::BufferDescriptor {
                    label: None,
                    size: 8 * SET as u64,
                    usage,
                    mapped_at_creation: false,
                })
            };
            let resolved = buffer(wgpu::BufferUsages::QUERY_RESOLVE | wgpu::BufferUsages::COPY_SRC);
            let readable = buffer(wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST);
            encoder.resolve_query_set(&set, 0..2 * names.len() as u32, &resolved, 0);
            encoder.copy_buffer_to_buffer(&resolved, 0, &readable, 0, 8 * SET as u64);
            profile.0.push(Resolved { names, buffer: readable });
        }
    }
}

fn lock(gpu: &Gpu) -> MutexGuard<'_, Option<Profile>> {
    gpu.profile.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What a kernel is called in tables.
fn title(name: &Name) -> String {
    let kinds: Vec<String> = name.slots.iter().map(|slot| format!("{:?}", slot.kind)).collect();
    format!("{:?}::{} {}", name.file, name.entry, kinds.join(" "))
}

pub(crate) fn is_on(gpu: &Gpu) -> bool {
    lock(gpu).is_some()
}

/// Starts profiling.
///
/// # Errors
/// If the GPU has no timestamps.
pub(crate) fn start(gpu: &Gpu) -> Result<()> {
    if !gpu.device.features().contains(wgpu::Features::TIMESTAMP_QUERY) {
        return Err(Error::Unsupported(format!("{} has no timestamps", gpu.name())));
    }
    *lock(gpu) = Some(Profile::default());
    Ok(())
}

/// Stops profiling. Returns the times since the start, the longest first.
///
/// # Errors
/// If the GPU fails.
pub(crate) fn stop(gpu: &Gpu) -> Result<Vec<Line>> {
    let all = lock(gpu).take().unwrap_or_default().0;
    gpu.submit()?;
    for Resolved { buffer, .. } in &all {
        buffer.slice(..).map_async(wgpu::MapMode::Read, |_| {});
    }
    gpu.wait(None)?;
    let period = f64::from(gpu.queue.get_timestamp_period()) / 1000.0;
    let mut times: HashMap<String, (usize, f64)> = HashMap::new();
    for Resolved { names, buffer } in all {
        let mapped = buffer.slice(..).get_mapped_range();
        let mapped =
            mapped.map_err(|error| Error::Backend(format!("{} cannot be read: {error}", gpu.name())))?;
        let stamps: &[[u64; 2]] = bytemuck::cast_slice(&mapped);
        for (name, [start, end]) in names.into_iter().zip(stamps) {
            let (count, micros) = times.entry(name).or_default();
            *count += 1;
            *micros += end.saturating_sub(*start) as f64 * period;
        }
    }
    let line = |(name, (count, micros))| Line { name, count, micros };
    let mut lines: Vec<Line> = times.into_iter().map(line).collect();
    lines.sort_by(|a, b| b.micros.total_cmp(&a.micros));
    Ok(lines)
}
