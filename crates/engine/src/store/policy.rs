//! Eviction: which of the resident experts leaves when room is needed.

/// Decides which expert leaves. Experts are numbered through all layers: layer · experts + expert.
pub trait Policy: Send {
    /// A new token (or a chunk of a prompt) begins.
    fn tick(&mut self);

    /// An expert was asked for by a token that is being written.
    fn used(&mut self, expert: usize);

    /// The one to evict among these resident, unpinned experts; never called with an empty list.
    fn victim(&mut self, candidates: &mut dyn Iterator<Item = usize>) -> usize;

    /// What is known about how often experts are used: `[experts]`, larger is hotter; for the heat file.
    fn heat(&self) -> Vec<f32>;

    /// Starts with what an earlier run knew.
    fn warm(&mut self, heat: &[f32]);
}

/// The policies there are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PolicyKind {
    /// Evicts the least recently used: the yardstick.
    Lru,
    /// Evicts the least frequently used, with old uses counting less.
    Lfu,
    /// Evicts what is least likely to be used for the time it takes until its layer comes again.
    #[default]
    Forecast,
}

impl PolicyKind {
    /// All of them.
    pub const ALL: [PolicyKind; 3] = [PolicyKind::Lru, PolicyKind::Lfu, PolicyKind::Forecast];

    /// The name for people, flags and JSON.
    pub fn name(self) -> &'static str {
        match self {
            PolicyKind::Lru => "lru",
            PolicyKind::Lfu => "lfu",
            PolicyKind::Forecast => "forecast",
        }
    }

    /// The policy of this name.
    pub fn parse(name: &str) -> Option<PolicyKind> {
        PolicyKind::ALL.into_iter().find(|kind| kind.name() == name)
    }
}

/// A policy for a model with so many experts in all layers together.
pub fn make(kind: PolicyKind, experts: usize) -> Box<dyn Policy> {
    match kind {
        PolicyKind::Lru => Box::new(Lru::new(experts)),
        PolicyKind::Lfu => Box::new(Lfu { uses: Uses::new(experts, LFU_HALF_LIFE) }),
        PolicyKind::Forecast => Box::new(Forecast::new(experts)),
    }
}

/// Tokens after which a use counts half for [`Lfu`].
const LFU_HALF_LIFE: f64 = 128.0;

struct Lru {
    /// `[experts]` When each was used last.
    last: Vec<u64>,
    now: u64,
}

impl Lru {
    fn new(experts: usize) -> Lru {
        Lru { last: vec![0; experts], now: 0 }
    }
}

impl Policy for Lru {
    fn tick(&mut self) {}

    fn used(&mut self, expert: usize) {
        self.now += 1;
        self.last[expert] = self.now;
    }

    fn victim(&mut self, candidates: &mut dyn Iterator<Item = usize>) -> usize {
        candidates.min_by_key(|&expert| self.last[expert]).expect(NO_CANDIDATE)
    }

    fn heat(&self) -> Vec<f32> {
        self.last.iter().map(|&last| (last as f64 / self.now.max(1) as f64) as f32).collect()
    }

    fn warm(&mut self, heat: &[f32]) {
        let mut order: Vec<usize> = (0..self.last.len()).filter(|&expert| heat[expert] > 0.0).collect();
        order.sort_by(|&a, &b| heat[a].total_cmp(&heat[b]));
        order.into_iter().for_each(|expert| self.used(expert));
    }
}

struct Lfu {
    uses: Uses,
}

impl Policy for Lfu {
    fn tick(&mut self) {
        self.uses.age();
    }

    fn used(&mut self, expert: usize) {
        self.uses.add(expert);
    }

    fn victim(&mut self, candidates: &mut dyn Iterator<Item = usize>) -> usize {
        lowest(candidates, |expert| self.uses.count[expert])
    }

    fn heat(&self) -> Vec<f32> {
        self.uses.heat()
    }

    fn warm(&mut self, heat: &[f32]) {
        self.uses.warm(heat);
    }
}

/// Scores an expert by how often it is used, and by how soon its layer comes again: keeping one whose layer was just
/// passed takes a slot for a whole token before it can pay.
struct Forecast {
    uses: Uses,
    /// `[experts]` How many uses of its token came before an expert's last one: the place of its layer.
    turn: Vec<u32>,
    /// Uses since the token began.
    now: u32,
    /// Uses of a whole token.
    round: u32,
}

impl Forecast {
    fn new(experts: usize) -> Forecast {
        Forecast { uses: Uses::new(experts, LFU_HALF_LIFE), turn: vec![0; experts], now: 0, round: 1 }
    }
}

impl Policy for Forecast {
    fn tick(&mut self) {
        self.uses.age();
        if self.now > 0 {
            self.round = self.now;
            self.now = 0;
        }
    }

    fn used(&mut self, expert: usize) {
        self.uses.add(expert);
        self.turn[expert] = self.now;
        self.now += 1;
    }

    fn victim(&mut self, candidates: &mut dyn Iterator<Item = usize>) -> usize {
        let (now, round) = (self.now, f64::from(self.round));
        lowest(candidates, |expert| {
            let turn = self.turn[expert];
            let wait = if turn >= now { f64::from(turn - now) } else { round - f64::from(now - turn) };
            self.uses.count[expert] / (round + wait)
        })
    }

    fn heat(&self) -> Vec<f32> {
        self.uses.heat()
    }

    fn warm(&mut self, heat: &[f32]) {
        self.uses.warm(heat);
    }
}

const NO_CANDIDATE: &str = "there is a candidate";

/// The candidate with the lowest score.
fn lowest(candidates: &mut dyn Iterator<Item = usize>, score: impl Fn(usize) -> f64) -> usize {
    let scored = candidates.map(|expert| (score(expert), expert));
    scored.min_by(|a, b| a.0.total_cmp(&b.0)).expect(NO_CANDIDATE).1
}

/// How often experts were used, with old uses counting less.
struct Uses {
    /// `[experts]` In units that shrink as `unit` grows.
    count: Vec<f64>,
    /// What a use counts now: it grows with time, which is cheaper than to let all counts shrink.
    unit: f64,
    growth: f64,
}

impl Uses {
    /// Uses that count half after so many tokens.
    fn new(experts: usize, half_life: f64) -> Uses {
        Uses { count: vec![0.0; experts], unit: 1.0, growth: (1.0 / half_life).exp2() }
    }

    fn age(&mut self) {
        self.unit *= self.growth;
        if self.unit > 1e100 {
            self.count.iter_mut().for_each(|count| *count /= self.unit);
            self.unit = 1.0;
        }
    }

    fn add(&mut self, expert: usize) {
        self.count[expert] += self.unit;
    }

    fn heat(&self) -> Vec<f32> {
        self.count.iter().map(|&count| (count / self.unit) as f32).collect()
    }

    fn warm(&mut self, heat: &[f32]) {
        for (count, &heat) in self.count.iter_mut().zip(heat) {
            *count = f64::from(heat) * self.unit;
        }
    }
}
