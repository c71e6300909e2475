//! A view of the store for monitoring, such as the web page: where each expert is, and whether it was requested
//! lately.

use super::{ExpertStore, Residence};

/// Where an expert is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Residency {
    /// Only on the drive.
    #[default]
    Absent,
    /// Being read into memory.
    Arriving,
    /// In RAM.
    Resident,
    /// In device memory.
    Device,
}

/// Whether an expert was requested since the previous picture.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Asked {
    /// It was not.
    #[default]
    Not,
    /// It was in memory.
    Hit,
    /// It was not in memory.
    Missed,
    /// Several times, with hits and misses.
    Both,
}

/// The state of one expert.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sight {
    /// Where the expert is.
    pub place: Residency,
    /// Whether it was requested.
    pub asked: Asked,
}

/// A view of the store's experts. Taken repeatedly with [`ExpertStore::look`], it shows what happened in between.
/// Each observer has a picture of its own.
#[derive(Clone, Debug, Default)]
pub struct Picture {
    experts: Vec<Sight>,
    /// When it was last taken: the number of pictures that all observers together had taken.
    taken: Option<u32>,
}

impl Picture {
    /// The state of all experts, layer by layer.
    pub fn experts(&self) -> &[Sight] {
        &self.experts
    }
}

impl ExpertStore {
    /// Updates a picture. In the first one no expert counts as requested.
    ///
    /// The lock is held for one layer at a time, so that computing threads hardly wait. A request during the update
    /// may show up in this picture and in the next.
    pub fn look(&self, picture: &mut Picture) {
        let since = {
            let mut state = self.shared.lock();
            state.pictures += 1;
            picture.taken.replace(state.pictures).unwrap_or(state.pictures)
        };
        picture.experts.resize(self.experts(), Sight::default());
        for layer in 0..self.shared.layers.len() {
            let experts = self.shared.numbering.layer(layer);
            if experts.is_empty() {
                continue;
            }
            let state = self.shared.lock();
            for expert in experts {
                let place = match state.experts[expert] {
                    _ if state.on_device(expert).is_some() => Residency::Device,
                    Residence::Drive => Residency::Absent,
                    Residence::Reading { .. } => Residency::Arriving,
                    Residence::Memory { .. } => Residency::Resident,
                };
                picture.experts[expert] = Sight { place, asked: state.asked[expert].since(since) };
            }
        }
    }
}

/// When an expert was last hit and last missed, as the number of pictures taken until then. Zero also means never:
/// nobody was observing.
#[derive(Clone, Copy, Default)]
pub(super) struct LastAsked {
    hit: u32,
    missed: u32,
}

impl LastAsked {
    /// Records a request after `pictures` pictures.
    pub fn note(&mut self, pictures: u32, hit: bool) {
        *(if hit { &mut self.hit } else { &mut self.missed }) = pictures;
    }

    /// How the expert was requested since a picture, whose number is not zero.
    fn since(self, picture: u32) -> Asked {
        match (self.hit >= picture, self.missed >= picture) {
            (false, false) => Asked::Not,
            (true, false) => Asked::Hit,
            (false, true) => Asked::Missed,
            (true, true) => Asked::Both,
        }
    }
}
