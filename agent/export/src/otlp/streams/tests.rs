use cotenant_model::sample::Histogram;

use super::*;
use crate::Id;

fn row(id: Id, tenant: &str, value: impl Into<Value>) -> Row {
    Row { metric: id.metric(), labels: vec![("tenant", tenant.to_owned())], value: value.into() }
}

fn counter(tenant: &str, value: u64) -> Row {
    row(Id::Operations, tenant, value)
}

/// Tenant, start, end and growth of what is sent.
fn sent(points: &[Point]) -> Vec<(String, u64, u64, Value)> {
    let of =
        |point: &Point| (point.row.labels[0].1.clone(), point.start_ns, point.at_ns, point.row.value.clone());
    points.iter().map(of).collect()
}

fn told(tenant: &str, start: u64, at: u64, value: u64) -> (String, u64, u64, Value) {
    (tenant.to_owned(), start, at, Value::Unsigned(value))
}

#[test]
fn a_cumulative_counter_starts_with_the_agent_or_when_it_came_or_fell() {
    let mut streams = Streams::new(Temporality::Cumulative);
    assert!(streams.collect(vec![counter("a", 5)], 10, 20));
    assert!(streams.collect(vec![counter("a", 7), counter("b", 1)], 10, 30));
    assert_eq!(sent(&streams.take()), [told("a", 10, 30, 7), told("b", 20, 30, 1)]);
    // `a` is gone for a while, and its counters begin at nothing when it is back.
    assert!(streams.collect(vec![counter("b", 2)], 10, 40));
    assert!(streams.collect(vec![counter("a", 6), counter("b", 1)], 10, 50));
    assert_eq!(sent(&streams.take()), [told("a", 40, 50, 6), told("b", 40, 50, 1)]);
}

#[test]
fn a_view_that_is_still_the_same_is_not_said_twice() {
    let mut streams = Streams::new(Temporality::Delta);
    assert!(streams.collect(vec![counter("a", 5)], 10, 20));
    assert!(!streams.collect(vec![counter("a", 5)], 10, 20));
}

#[test]
fn a_clock_that_is_set_back_gives_no_point_that_ends_before_it_starts() {
    let mut streams = Streams::new(Temporality::Cumulative);
    streams.collect(vec![counter("a", 5)], 100, 200);
    streams.collect(vec![counter("a", 6), counter("b", 1)], 100, 50);
    assert!(streams.take().iter().all(|point| point.start_ns <= point.at_ns));
}

#[test]
fn c112_delta_gives_what_was_not_delivered_again_with_what_came_since() {
    let mut streams = Streams::new(Temporality::Delta);
    streams.collect(vec![counter("a", 5)], 10, 20);
    let failed = streams.take().into_owned();
    assert_eq!(sent(&failed), [told("a", 10, 20, 5)]);
    streams.collect(vec![counter("a", 12)], 10, 30);
    streams.give_back(failed);
    let delivered = streams.take().into_owned();
    assert_eq!(sent(&delivered), [told("a", 10, 30, 12)]);
    streams.collect(vec![counter("a", 13)], 10, 40);
    assert_eq!(sent(&streams.take()), [told("a", 30, 40, 1)]);
}

#[test]
fn c112_delta_keeps_what_a_tenant_counted_that_is_gone_before_the_receiver_is_back() {
    let mut streams = Streams::new(Temporality::Delta);
    streams.collect(vec![counter("a", 5), counter("z", 1)], 10, 20);
    let failed = streams.take().into_owned();
    streams.give_back(failed);
    streams.collect(vec![counter("z", 1)], 10, 30);
    assert_eq!(sent(&streams.take()), [told("a", 10, 20, 5), told("z", 10, 30, 1)]);
    streams.collect(vec![counter("a", 2), counter("z", 1)], 10, 40);
    assert_eq!(sent(&streams.take()), [told("a", 30, 40, 2), told("z", 30, 40, 0)]);
}

#[test]
fn c113_a_counter_that_fell_counts_from_nothing() {
    let mut streams = Streams::new(Temporality::Delta);
    streams.collect(vec![counter("a", 50)], 10, 20);
    streams.take();
    streams.collect(vec![counter("a", 3)], 10, 30);
    assert_eq!(sent(&streams.take()), [told("a", 20, 30, 3)]);
}

#[test]
fn a_histogram_is_cut_into_intervals_bucket_by_bucket() {
    let histogram = |counts: [u64; 3], sum_ns| {
        let mut histogram = Histogram { count: counts.iter().sum(), sum_ns, ..Histogram::default() };
        histogram.buckets[..3].copy_from_slice(&counts);
        row(Id::DriverWaitDuration, "a", &histogram)
    };
    let mut streams = Streams::new(Temporality::Delta);
    streams.collect(vec![histogram([1, 2, 3], 1_000_000_000)], 10, 20);
    streams.take();
    streams.collect(vec![histogram([1, 4, 3], 3_000_000_000)], 10, 30);
    let failed = streams.take().into_owned();
    streams.give_back(failed);
    streams.collect(vec![histogram([2, 4, 3], 4_000_000_000)], 10, 40);
    let points = streams.take().into_owned();
    let Value::Distribution(grown) = &points[0].row.value else { panic!("not a distribution") };
    let counts: Vec<u64> = grown.buckets.iter().take(3).map(|(_, count)| *count).collect();
    assert_eq!((counts, grown.count(), grown.sum_seconds), (vec![1, 2, 0], 3, 3.0));
    assert_eq!((points[0].start_ns, points[0].at_ns), (20, 40));
}

#[test]
fn levels_are_levels_in_both_and_what_is_lost_of_them_is_said() {
    let mut streams = Streams::new(Temporality::Delta);
    let rows = |level: u64| vec![counter("a", 1), row(Id::MemoryLive, "a", level)];
    let mut first = rows(7);
    first.sort_by(order);
    streams.collect(first, 10, 20);
    let failed = streams.take().into_owned();
    assert_eq!(failed.len(), 2);
    assert_eq!(streams.give_back(failed), 1);
    let mut second = rows(9);
    second.sort_by(order);
    streams.collect(second, 10, 30);
    let values: Vec<Value> = streams.take().iter().map(|point| point.row.value.clone()).collect();
    assert!(values.contains(&Value::Unsigned(9)) && values.contains(&Value::Unsigned(1)), "{values:?}");
    assert_eq!(values.len(), 2);
}

#[test]
fn what_the_hardware_counted_before_the_agent_came_is_no_growth() {
    let energy = |joules: f64| vec![row(Id::Energy, "a", joules)];
    let mut cumulative = Streams::new(Temporality::Cumulative);
    cumulative.collect(energy(500.0), 10, 20);
    cumulative.collect(energy(510.0), 10, 30);
    assert_eq!(sent(&cumulative.take()), [("a".to_owned(), 20, 30, Value::Float(510.0))]);
    let mut delta = Streams::new(Temporality::Delta);
    delta.collect(energy(500.0), 10, 20);
    assert!(delta.take().is_empty());
    delta.collect(energy(510.0), 10, 30);
    assert_eq!(sent(&delta.take()), [("a".to_owned(), 20, 30, Value::Float(10.0))]);
}
