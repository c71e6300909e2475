//! The router's choice: made on the GPU, and copied to RAM if the host needs it.

use bytemuck::cast_slice_mut;
use forebay_engine::internals::backend::{Buf, GroupScore, Router, RouterWeights, Routing, Scores};
use forebay_engine::{Error, Result};

use super::GpuBackend;
use crate::device::{Memory, Span};
use crate::recorder::{Args, Bound};
use crate::shaders::{File, Name};

/// The most experts of a layer: so many fit into a workgroup's memory.
const MOST_EXPERTS: usize = 1024;

/// The alignment of lists.
const ALIGNMENT: usize = 256;

/// Which of two choices that are known at the same time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// That of the current layer.
    Now,
    /// The prediction for the next layer.
    Next,
}

/// A router's choice on the GPU.
#[derive(Clone)]
pub struct Chosen {
    /// `[rows, top_k]` The experts of each row, the best first.
    pub experts: Span,
    /// `[rows, top_k]` Their weights.
    pub weights: Span,
    pub rows: usize,
    pub top_k: usize,
    /// The number of the layer's experts.
    pub count: usize,
}

impl Chosen {
    pub fn pairs(&self) -> usize {
        self.rows * self.top_k
    }
}

/// The memory of choices: experts and weights of both turns.
#[derive(Default)]
pub struct Choices(Option<Memory>);

impl GpuBackend {
    /// Records a router's choice. It is valid until the next one of the same turn.
    ///
    /// # Errors
    /// If the router is not supported, or there is no memory.
    pub fn choose(
        &mut self,
        logits: Buf,
        router: &Router,
        weights: &RouterWeights,
        turn: Turn,
    ) -> Result<Chosen> {
        if router.experts > MOST_EXPERTS {
            return Err(Error::Unsupported(format!(
                "{} experts in one layer on {}, which chooses among {MOST_EXPERTS}; use Options::device = None",
                router.experts,
                self.gpu.name()
            )));
        }
        let chosen = self.place_choice(router, turn)?;
        let groups = router.groups.filter(|groups| groups.used < groups.count);
        let name = Name::new(File::Routing, "route")
            .with("EXPERTS", router.experts as u32)
            .with("GROUPS", groups.map_or(1, |groups| groups.count as u32))
            .with("CHOSEN", router.top_k as u32);
        let (scores, tolerance) = match router.scores {
            Scores::Softmax => (0, 0.0),
            Scores::Sigmoid => (1, 0.0),
            Scores::SparseMixer { tolerance } => (2, tolerance),
        };
        let args = Args::new()
            .int(scores)
            .float(tolerance)
            .int(groups.map_or(0, |groups| groups.count))
            .int(groups.map_or(0, |groups| groups.used))
            .flag(groups.is_some_and(|groups| groups.score == GroupScore::BestTwo))
            .flag(weights.correction.is_some())
            .flag(weights.factors.is_some())
            .flag(router.normalise)
            .float(router.epsilon)
            .float(router.scale);
        let bound: [Bound; 5] = [
            self.at(logits).into(),
            weights.correction.map(|w| self.vector(w)).into(),
            weights.factors.map(|w| self.vector(w)).into(),
            chosen.experts.clone().into(),
            chosen.weights.clone().into(),
        ];
        self.record(&name, [self.rows, 1, 1], &args, &bound)?;
        Ok(chosen)
    }

    /// Where a choice of the current rows is.
    fn place_choice(&mut self, router: &Router, turn: Turn) -> Result<Chosen> {
        let pairs = self.rows * router.top_k;
        let list = (pairs * 4).next_multiple_of(ALIGNMENT) as u64;
        let memory = match self.choices.0.take() {
            Some(memory) if memory.bytes() >= 4 * list => memory,
            _ => self.gpu.allocate((4 * list).next_power_of_two(), "scratch")?,
        };
        let first = 2 * (turn as u64) * list;
        let part = |start: u64| memory.whole().part(start, pairs as u64 * 4);
        let (experts, weights) = (part(first), part(first + list));
        self.choices.0 = Some(memory);
        Ok(Chosen { experts, weights, rows: self.rows, top_k: router.top_k, count: router.experts })
    }

    /// Submits everything recorded, waits for choices and copies them to RAM: that of this turn, and those of the
    /// next turn if there is any.
    ///
    /// # Errors
    /// If the GPU fails.
    pub fn read_choices<const N: usize>(&mut self, choices: [(&Chosen, &mut Routing); N]) -> Result<()> {
        // They are consecutive, so one copy is enough.
        let first = choices.iter().map(|(chosen, _)| chosen.experts.start).min().unwrap_or(0);
        let end = choices.iter().map(|(chosen, _)| chosen.weights.start + chosen.weights.bytes).max();
        let Some(end) = end else { return Ok(()) };
        let memory = self.choices.0.as_ref().expect("a choice was made").whole();
        let mut words = vec![0u32; ((end - first) / 4) as usize];
        self.flush()?;
        self.recorder.read(&memory.part(first, end - first), cast_slice_mut(&mut words))?;
        for (chosen, routing) in choices {
            let at = |span: &Span| ((span.start - first) / 4) as usize;
            let (experts, weights) = routing.prepare(chosen.rows, chosen.top_k);
            experts.copy_from_slice(&words[at(&chosen.experts)..][..experts.len()]);
            let bits = &words[at(&chosen.weights)..][..weights.len()];
            weights.iter_mut().zip(bits).for_each(|(weight, bits)| *weight = f32::from_bits(*bits));
            if experts.iter().any(|&expert| expert as usize >= chosen.count) {
                let message = format!("{} chose an expert that there is not", self.gpu.name());
                return Err(Error::Backend(message));
            }
            routing.sort(chosen.count);
        }
        Ok(())
    }
}
