//! Owns what is told when: events as they come, slow calls at their rate, incidents when they close and, while they last,
//! every few minutes.
//! Refuses to send: spans and records go to the outbox and are forgotten.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex};

use super::call::{Call, Sampler};
use super::context::{Attributes, Context, Links};
use super::exemplars::{Exemplars, Mark};
use super::resource::Resource;
use super::sender::{Outbox, Sender};
use super::{incident, records};
use crate::catalogue::attributes::{CULPRIT, TENANT};
use cotenant_model::Culprit;
use cotenant_model::incident::{Changes, Evidence, Incident, IncidentId, Incidents, Observation};

/// Slow calls that an incident can be linked to.
const CALLS: usize = 256;
/// Links of one span.
const LINKS: usize = 32;

/// How much is told of incidents and calls.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rates {
    pub slow_calls_per_second: u32,
    /// How often an incident that lasts is told as it stands.
    pub standing_seconds: f64,
}

impl Default for Rates {
    fn default() -> Self {
        Self { slow_calls_per_second: 10, standing_seconds: 300.0 }
    }
}

/// A call that has been told.
#[derive(Debug)]
struct Told {
    context: Context,
    caller: String,
    culprit: String,
    start_unix: f64,
    end_unix: f64,
}

/// Turns each tick's events into spans and log records.
#[derive(Debug)]
pub struct Teller {
    outbox: Outbox,
    seed: String,
    rates: Rates,
    sampler: Sampler,
    /// Open incidents, and when they are told next.
    standing: BTreeMap<IncidentId, f64>,
    calls: VecDeque<Told>,
    /// The last failure record that was told.
    last_record: Option<u64>,
    exemplars: Arc<Mutex<Exemplars>>,
}

impl Teller {
    pub fn new(sender: &Sender, resource: &Resource, rates: Rates) -> Self {
        Self {
            outbox: sender.outbox(),
            seed: resource.seed().to_owned(),
            rates,
            sampler: Sampler::new(rates.slow_calls_per_second),
            standing: BTreeMap::new(),
            calls: VecDeque::new(),
            last_record: None,
            exemplars: sender.exemplars(),
        }
    }

    /// One tick: what was observed, what it changed, and the slow calls that came with it.
    pub fn tell(
        &mut self,
        incidents: &Incidents,
        changes: &Changes,
        observation: &Observation,
        calls: Vec<Call>,
    ) {
        let now = observation.at_unix;
        let happened = !(calls.is_empty()
            && observation.kills.is_empty()
            && observation.xids.is_empty()
            && observation.failures.is_empty());
        // Making views of open incidents is not free; nothing is looked up on a quiet tick.
        let open = if happened && incidents.open() > 0 {
            incidents.list(Some(f64::INFINITY), None)
        } else {
            Vec::new()
        };
        self.sampler.pass(observation.elapsed);
        self.tell_calls(calls, &open);
        self.tell_events(observation, &open);
        for id in &changes.opened {
            let Some(incident) = incidents.find(*id) else { continue };
            self.outbox.record(records::opened(&incident, now, self.context(*id)));
            self.standing.insert(*id, now + self.rates.standing_seconds);
        }
        for (from, _) in &changes.merged {
            self.standing.remove(from);
        }
        for id in &changes.closed {
            self.standing.remove(id);
            let Some(incident) = incidents.find(*id) else { continue };
            let links = self.links_to_calls(&incident);
            for span in incident::closed(&incident, &self.seed, &links) {
                self.outbox.span(span);
            }
            self.outbox.record(records::closed(&incident, now, self.context(*id)));
        }
        self.tell_standing(incidents, now);
    }

    /// Before the agent stops: incidents that are open are told as they stand.
    pub fn farewell(&mut self, incidents: &Incidents, now_unix: f64) {
        self.standing.values_mut().for_each(|due| *due = now_unix);
        self.tell_standing(incidents, now_unix);
    }

    fn context(&self, id: IncidentId) -> Context {
        incident::context(&self.seed, id)
    }

    fn tell_standing(&mut self, incidents: &Incidents, now: f64) {
        let due: Vec<IncidentId> =
            self.standing.iter().filter(|(_, due)| **due <= now).map(|(id, _)| *id).collect();
        for id in due {
            let Some(incident) = incidents.find(id) else {
                self.standing.remove(&id);
                continue;
            };
            self.outbox.span(incident::standing(&incident, &self.seed, now));
            self.standing.insert(id, now + self.rates.standing_seconds);
        }
    }

    fn tell_events(&mut self, observation: &Observation, open: &[Incident]) {
        let now = observation.at_unix;
        let seed = self.seed.clone();
        let within = |is: &dyn Fn(&Evidence) -> bool| {
            let found = open.iter().find(|incident| incident.evidence.iter().any(is));
            found.map(|found| incident::context(&seed, found.id))
        };
        for kill in &observation.kills {
            let context = within(&|line| {
                matches!(line, Evidence::Kill(known) if known.victim == kill.victim
                    && (known.at_unix - kill.at_unix).abs() < 1e-6)
            });
            self.outbox.record(records::kill(kill, now, context));
        }
        for xid in &observation.xids {
            let context = within(
                &|line| matches!(line, Evidence::Xid(known) if known.gpu == xid.gpu && known.code == xid.code),
            );
            self.outbox.record(records::xid(xid, now, context));
        }
        let told = self.last_record;
        for failure in observation.failures.iter().filter(|record| told.is_none_or(|told| record.id > told)) {
            let context =
                within(&|line| matches!(line, Evidence::Failure(known) if known.record == failure.id));
            self.outbox.record(records::failure(failure, now, context));
            self.last_record = self.last_record.max(Some(failure.id));
        }
    }

    /// The longest first: of two that cannot both be told it is the one that matters.
    fn tell_calls(&mut self, mut calls: Vec<Call>, open: &[Incident]) {
        if !self.outbox.has_spans() {
            return;
        }
        calls.sort_by(|one, two| two.seconds.total_cmp(&one.seconds));
        for call in calls {
            let Some(sampled_out) = self.sampler.take() else {
                self.outbox.sampled_out();
                continue;
            };
            let links = self.links_to_incidents(&call, open);
            let context = call.context(&self.seed);
            self.mark(&call, context);
            self.outbox.span(call.span(&self.seed, sampled_out, &links));
            if self.calls.len() >= CALLS {
                self.calls.pop_front();
            }
            self.calls.push_back(Told {
                context,
                culprit: call.culprit.as_ref().map_or("", Culprit::as_str).to_owned(),
                start_unix: call.start_unix,
                end_unix: call.start_unix + call.seconds,
                caller: call.victim.name,
            });
        }
    }

    /// The call stands for its bucket in the histogram of calls, its longest wait for that in the histogram of waits.
    fn mark(&self, call: &Call, context: Context) {
        let Ok(mut exemplars) = self.exemplars.lock() else { return };
        let at_unix = call.start_unix + call.seconds;
        let mark = Mark { context, seconds: call.seconds, at_unix };
        exemplars.put_call(&call.victim.name, call.operation, mark);
        if let Some(class) = call.class.filter(|_| call.longest_seconds > 0.0) {
            exemplars.put_wait(&call.victim.name, class, Mark { seconds: call.longest_seconds, ..mark });
        }
    }

    fn links_to_incidents(&self, call: &Call, open: &[Incident]) -> Links {
        let concerned =
            |incident: &&Incident| incident.victims.iter().any(|victim| victim.tenant == call.victim);
        let why = || Attributes::default().words("cotenant.link", "victim_of_incident").0;
        Links::of(open.iter().filter(concerned).map(|found| self.context(found.id).link(why())), LINKS)
    }

    /// The culprits' own calls, and calls of the victims that one of them made long; newest first, as many of each.
    fn links_to_calls(&self, incident: &Incident) -> Links {
        let is_culprit = |name: &str| incident.culprits.iter().any(|blame| blame.tenant.name == name);
        let is_victim = |name: &str| incident.victims.iter().any(|victim| victim.tenant.name == name);
        let until = incident.end_unix.unwrap_or(incident.last_unix);
        let within = |call: &&Told| call.end_unix >= incident.start_unix && call.start_unix <= until;
        let calls = || self.calls.iter().rev().filter(within);
        let own = calls().filter(|call| is_culprit(&call.caller)).map(|call| {
            let why = Attributes::default().words("cotenant.link", "culprit_call");
            call.context.link(why.named(TENANT, &call.caller).0)
        });
        let slow = calls().filter(|call| is_victim(&call.caller) && is_culprit(&call.culprit)).map(|call| {
            let why = Attributes::default().words("cotenant.link", "slow_call");
            call.context.link(why.named(CULPRIT, &call.culprit).0)
        });
        let mut links = Links::of(own, LINKS / 2);
        links.add(Links::of(slow, LINKS / 2));
        links
    }
}
