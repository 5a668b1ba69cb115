//! Owns the sending: one thread, one queue a signal, the collection of metrics at their interval, the flush at the end.
//! Refuses to be waited for: producers push and go on; a stop takes two seconds at most.

use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use bytes::Bytes;
use cotenant_model::view::{OtlpView, View};
use opentelemetry_proto::tonic::collector::{
    logs::v1::ExportLogsServiceRequest, trace::v1::ExportTraceServiceRequest,
};
use opentelemetry_proto::tonic::logs::v1::{LogRecord, ResourceLogs, ScopeLogs};
use opentelemetry_proto::tonic::trace::v1::{ResourceSpans, ScopeSpans, Span};
use prost::Message;
use tokio::sync::watch;
use tokio::time::MissedTickBehavior;

use super::client::{Client, ClientError};
use super::exemplars::Exemplars;
use super::link::{Link, Parcel, Step, Stop};
use super::points::{Form, cut, request};
use super::queue::{Entry, Queue};
use super::resource::Resource;
use super::settings::{Settings, Signal};
use super::streams::{Point, Streams, Temporality};
use super::tally::{Dropped, Tally};
use crate::rows;

/// How long what is left may take to send once a stop is asked for.
const FLUSH: Duration = Duration::from_secs(2);
/// Spans or log records in one request.
const BATCH: usize = 512;
const BATCH_BYTES: usize = 1 << 20;

#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error("OTLP {signal} cannot be sent")]
    Client {
        signal: &'static str,
        #[source]
        source: ClientError,
    },
    #[error("cannot start the OTLP thread; raise the process limit")]
    Thread(#[source] std::io::Error),
}

/// Where views come from: the latest one, once there is one.
pub type Source = Box<dyn Fn() -> Option<Arc<View>> + Send>;

/// The door for traces and logs. Pushing never waits.
#[derive(Clone, Debug)]
pub(super) struct Outbox {
    spans: Option<Arc<Queue<Span>>>,
    records: Option<Arc<Queue<LogRecord>>>,
    spans_tally: Option<Arc<Tally>>,
}

impl Outbox {
    pub(super) fn span(&self, span: Span) {
        if let Some(queue) = &self.spans {
            let bytes = span.encoded_len();
            queue.push(span, 1, bytes);
        }
    }

    pub(super) fn record(&self, record: LogRecord) {
        if let Some(queue) = &self.records {
            let bytes = record.encoded_len();
            queue.push(record, 1, bytes);
        }
    }

    pub(super) fn sampled_out(&self) {
        if let Some(tally) = &self.spans_tally {
            tally.lose(Dropped::SampledOut, 1);
        }
    }

    pub(super) const fn has_spans(&self) -> bool {
        self.spans.is_some()
    }
}

/// The thread that sends.
#[derive(Debug)]
pub struct Sender {
    stop: watch::Sender<Option<Instant>>,
    thread: JoinHandle<()>,
    account: Account,
    outbox: Outbox,
    exemplars: Arc<Mutex<Exemplars>>,
}

/// How the sending goes. Cheap to clone, and outlives the sender.
#[derive(Clone, Debug, Default)]
pub struct Account(Vec<Arc<Tally>>);

impl Account {
    pub fn view(&self) -> Vec<OtlpView> {
        self.0.iter().map(|tally| tally.view()).collect()
    }
}

/// One signal's queue with the link that empties it.
struct Lane<T> {
    queue: Arc<Queue<T>>,
    link: Link,
    linger: Duration,
    /// Things in one request.
    batch: usize,
}

impl Sender {
    /// Files are read here, the network is not touched.
    pub fn start(settings: &Settings, resource: Resource, source: Source) -> Result<Self, StartError> {
        let mut account = Vec::new();
        let mut link = |signal: Signal| -> Result<Option<Link>, StartError> {
            let Some(target) = settings.targets.get(&signal) else { return Ok(None) };
            let client = Client::new(signal, target.clone())
                .map_err(|source| StartError::Client { signal: signal.as_str(), source })?;
            let tally = Arc::new(Tally::new(signal));
            account.push(Arc::clone(&tally));
            Ok(Some(Link::new(signal, client, tally, settings.pauses)))
        };
        let metrics = link(Signal::Metrics)?;
        let spans = link(Signal::Traces)?.map(|link| lane(link, settings));
        let records = link(Signal::Logs)?.map(|link| lane(link, settings));
        let outbox = Outbox {
            spans: spans.as_ref().map(|lane| Arc::clone(&lane.queue)),
            records: records.as_ref().map(|lane| Arc::clone(&lane.queue)),
            spans_tally: spans.as_ref().map(|lane| Arc::clone(&lane.link.tally)),
        };
        let exemplars = Arc::new(Mutex::new(Exemplars::default()));
        let marks = Arc::clone(&exemplars);
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            // Names are looked up there, and nothing else.
            .max_blocking_threads(1)
            .thread_keep_alive(Duration::from_secs(1))
            .build()
            .map_err(StartError::Thread)?;
        let (stop, stopped) = watch::channel(None);
        let settings = settings.clone();
        let work = async move {
            let stop = Stop::new(stopped);
            let resource = &resource;
            let spans = async {
                if let Some(lane) = spans {
                    lane.run(stop.clone(), |list| parcel_of_spans(list, resource)).await;
                }
            };
            let records = async {
                if let Some(lane) = records {
                    lane.run(stop.clone(), |list| parcel_of_records(list, resource)).await;
                }
            };
            let metrics = async {
                let Some(link) = metrics else { return };
                let collection = Collection {
                    source,
                    streams: Streams::new(settings.temporality),
                    form: Form { temporality: settings.temporality, histograms: settings.histograms },
                    resource,
                    tally: Arc::clone(&link.tally),
                    exemplars: marks,
                };
                match settings.temporality {
                    Temporality::Cumulative => cumulative(collection, link, &settings, stop.clone()).await,
                    Temporality::Delta => delta(collection, link, &settings, stop.clone()).await,
                }
            };
            tokio::join!(spans, records, metrics);
        };
        let thread = std::thread::Builder::new()
            .name("otlp".to_owned())
            .spawn(move || {
                runtime.block_on(work);
                // A name that is still being looked up must not hold the stop up.
                runtime.shutdown_background();
            })
            .map_err(StartError::Thread)?;
        Ok(Self { stop, thread, account: Account(account), outbox, exemplars })
    }

    pub fn account(&self) -> Account {
        self.account.clone()
    }

    /// The marks that the tellers of this sender leave.
    pub fn exemplars(&self) -> Arc<Mutex<Exemplars>> {
        Arc::clone(&self.exemplars)
    }

    pub(super) fn outbox(&self) -> Outbox {
        self.outbox.clone()
    }

    /// Sends what is left, for two seconds at most; what is not gone by then is counted as dropped.
    pub fn stop(self) -> Vec<OtlpView> {
        let _ = self.stop.send(Some(Instant::now() + FLUSH));
        if self.thread.join().is_err() {
            tracing::warn!("the OTLP thread ended in panic");
        }
        self.account.view()
    }
}

fn lane<T>(link: Link, settings: &Settings) -> Lane<T> {
    let queue = Arc::new(Queue::new(settings.bounds, Arc::clone(&link.tally)));
    Lane { queue, link, linger: settings.linger, batch: BATCH }
}

impl<T> Lane<T> {
    /// Until the agent stops and the queue is empty.
    async fn run(mut self, mut stop: Stop, pack: impl Fn(Vec<Entry<T>>) -> Option<Parcel>) {
        loop {
            if stop.deadline().is_none() {
                tokio::select! { () = self.queue.arrival() => {}, () = stop.asked() => {} }
            }
            if stop.deadline().is_none() && !self.linger.is_zero() {
                tokio::select! { () = tokio::time::sleep(self.linger) => {}, () = stop.asked() => {} }
            }
            while let Some(parcel) = pack(self.queue.fetch(self.batch, BATCH_BYTES)) {
                self.link.deliver(&parcel, &mut stop).await;
                if stop.deadline().is_some_and(|deadline| deadline <= Instant::now()) {
                    break;
                }
            }
            if stop.deadline().is_some() {
                self.queue.close();
                return;
            }
        }
    }
}

fn parcel_of_spans(entries: Vec<Entry<Span>>, resource: &Resource) -> Option<Parcel> {
    let born = entries.first()?.born;
    let items = entries.len() as u64;
    let scope = ScopeSpans {
        scope: Some(resource.scope()),
        spans: entries.into_iter().map(|entry| entry.thing).collect(),
        ..ScopeSpans::default()
    };
    let resource_spans = vec![ResourceSpans {
        resource: Some(resource.message()),
        scope_spans: vec![scope],
        ..ResourceSpans::default()
    }];
    Some(Parcel { body: ExportTraceServiceRequest { resource_spans }.encode_to_vec().into(), items, born })
}

fn parcel_of_records(entries: Vec<Entry<LogRecord>>, resource: &Resource) -> Option<Parcel> {
    let born = entries.first()?.born;
    let items = entries.len() as u64;
    let scope = ScopeLogs {
        scope: Some(resource.scope()),
        log_records: entries.into_iter().map(|entry| entry.thing).collect(),
        ..ScopeLogs::default()
    };
    let resource_logs = vec![ResourceLogs {
        resource: Some(resource.message()),
        scope_logs: vec![scope],
        ..ResourceLogs::default()
    }];
    Some(Parcel { body: ExportLogsServiceRequest { resource_logs }.encode_to_vec().into(), items, born })
}

/// The latest view, as messages.
struct Collection<'a> {
    source: Source,
    streams: Streams,
    form: Form,
    resource: &'a Resource,
    tally: Arc<Tally>,
    exemplars: Arc<Mutex<Exemplars>>,
}

impl Collection<'_> {
    /// False when there is no view, or still the same.
    fn collect(&mut self) -> bool {
        let Some(view) = (self.source)() else { return false };
        let fresh =
            self.streams.collect(rows(&view), nanoseconds(view.started_unix), nanoseconds(view.taken_unix));
        self.tally.lose(Dropped::QueueFull, self.streams.given_up());
        fresh
    }

    fn pack(&self, points: &[Point]) -> Parcel {
        let exemplars = self.exemplars.lock().map(|marks| marks.clone()).unwrap_or_default();
        let body: Bytes = request(points, self.form, self.resource, &exemplars).encode_to_vec().into();
        Parcel { body, items: points.len() as u64, born: Instant::now() }
    }
}

/// Unix seconds as OTLP writes them.
pub(super) fn nanoseconds(unix_seconds: f64) -> u64 {
    let time = Duration::try_from_secs_f64(unix_seconds).unwrap_or_default();
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Each collection waits in the queue with its own time until it is delivered or a newer one needs the room.
async fn cumulative(mut collection: Collection<'_>, link: Link, settings: &Settings, mut stop: Stop) {
    let lane: Lane<Parcel> = Lane { linger: Duration::ZERO, batch: 1, ..lane(link, settings) };
    let queue = Arc::clone(&lane.queue);
    // The last collection must be in the queue before the lane empties it for the last time.
    let (last, stopped) = watch::channel(None);
    let sending = lane.run(Stop::new(stopped), |mut entries| entries.pop().map(|entry| entry.thing));
    let collecting = async {
        let mut ticks = interval(settings.interval);
        loop {
            tokio::select! { _ = ticks.tick() => {}, () = stop.asked() => {} }
            if collection.collect() {
                let parcels: Vec<Parcel> = {
                    let points = collection.streams.standing();
                    cut(points).into_iter().map(|points| collection.pack(points)).collect()
                };
                for parcel in parcels {
                    let (items, bytes) = (parcel.items, parcel.body.len());
                    queue.push(parcel, items, bytes);
                }
            }
            if let Some(deadline) = stop.deadline() {
                let _ = last.send(Some(deadline));
                return;
            }
        }
    };
    tokio::join!(sending, collecting);
}

/// What has not been acknowledged stays in the streams and grows: no queue, and nothing that a queue could drop.
async fn delta(mut collection: Collection<'_>, mut link: Link, settings: &Settings, mut stop: Stop) {
    let mut ticks = interval(settings.interval);
    let mut pause: Option<Instant> = None;
    loop {
        let patience = async {
            match pause {
                Some(until) => tokio::time::sleep_until(until.into()).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! { _ = ticks.tick() => {}, () = patience => {}, () = stop.asked() => {} }
        let fresh = collection.collect();
        let stopping = stop.deadline().is_some();
        let due = pause.is_none_or(|until| until <= Instant::now()) || stopping;
        if due && (fresh || pause.is_some()) {
            pause = send_growth(&mut collection, &mut link, &stop).await;
        }
        if stopping {
            let left = collection.streams.take().len() as u64;
            if pause.is_some() {
                link.tally.lose(Dropped::Stopped, left);
            }
            return;
        }
    }
}

/// Says until when to wait after a failure.
async fn send_growth(collection: &mut Collection<'_>, link: &mut Link, stop: &Stop) -> Option<Instant> {
    let points = collection.streams.take().into_owned();
    let mut lists = cut(&points).into_iter();
    for list in lists.by_ref() {
        let parcel = collection.pack(list);
        if let Step::Wait(pause) = link.attempt(&parcel, stop).await {
            let mut rest = list.to_vec();
            rest.extend(lists.flatten().cloned());
            let levels = collection.streams.give_back(rest);
            link.tally.lose(Dropped::Superseded, levels);
            return Some(Instant::now() + pause);
        }
    }
    None
}

fn interval(every: Duration) -> tokio::time::Interval {
    let mut ticks = tokio::time::interval(every);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks
}
