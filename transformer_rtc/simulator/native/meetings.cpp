// SPDX-License-Identifier: Apache-2.0
// Where threads meet: barriers of a CTA and of a cluster, and warps' operations.
#include "calls.hpp"

namespace simulator {

void Machine::cluster_arrived(Cluster& cluster) {
  // What a whole CTA releases at one tick is one entry.
  for (size_t begin = 0; begin < cluster.releases.size();) {
    const auto& [first, clock] = cluster.releases[begin];
    size_t end = begin;
    while (end < cluster.releases.size() && cluster.releases[end].first->cta == first->cta &&
           cluster.releases[end].second == clock) {
      ++end;
    }
    if (end - begin == first->cta->threads.size()) {
      cluster.pending.learn(key_of(Owner::cta, first->cta->number), clock + 1);
    } else {
      for (size_t i = begin; i < end; ++i) {
        const auto& [thread, tick] = cluster.releases[i];
        cluster.pending.learn(key_of(Owner::thread, thread->number), tick + 1);
      }
    }
    begin = end;
  }
  cluster.releases.clear();
  cluster.released = std::move(cluster.pending);
  cluster.pending.clear();
  cluster.arrived = 0;
  ++cluster.phase;
  ++progress_;
  came_to_something();
  for (Cta& cta : cluster.ctas) wake(cta.threads, &cluster);
}

unsigned Calls::cta_barrier(bool predicate, const void* caller) {
  Machine& machine = *Machine::current;
  Thread& thread = *machine.running_;
  Cta& cta = *thread.cta;
  if (cta.finished > 0) {
    machine.fail_here("divergent_barrier",
                      "the thread waits for its whole CTA, of which " + std::to_string(cta.finished) +
                          " threads have left the kernel",
                      caller);
  }
  if (cta.arrived == 0) {
    cta.barrier_caller = caller;
    cta.barrier_first = &thread;
    cta.predicates = 0;
  } else if (machine.launch_->checked && caller != cta.barrier_caller) {
    machine.suspect("threads of a CTA meet at different barriers",
                    machine.party(*cta.barrier_first, cta.barrier_caller), machine.party(thread, caller));
  }
  cta.predicates += predicate;
  if (++cta.arrived < cta.threads.size()) {
    machine.wait(thread, &cta, "a barrier of its CTA", caller);
  } else {
    cta.result = cta.predicates;
    cta.arrived = 0;
    machine.came_to_something();
    if (machine.launch_->checked) machine.meet_cta(cta);
    machine.wake(cta.threads, &cta);
    machine.pass(thread);
  }
  return cta.result;
}

unsigned long long Calls::collective(Collective kind, unsigned mask, unsigned long long value, unsigned source,
                                     const void* caller) {
  Machine& machine = *Machine::current;
  Thread& thread = *machine.running_;
  Warp& warp = *thread.warp;
  const unsigned lane = thread.index % 32, bit = 1u << lane;
  mask &= warp.lanes;
  if ((mask & bit) == 0) {
    machine.fail_here("divergent_barrier", "the mask of a warp's operation does not name the lane that calls it",
                      caller);
  }
  if ((mask & warp.finished) != 0) {
    machine.fail_here("divergent_barrier", "the lane waits for lanes of its warp that have left the kernel", caller);
  }
  Meeting* meeting = nullptr;
  for (const auto& candidate : warp.meetings) {
    if (candidate->mask == mask && candidate->kind == kind && candidate->arrived != mask &&
        (candidate->arrived & bit) == 0) {
      meeting = candidate.get();
    }
  }
  if (meeting == nullptr) {
    if (warp.spare.empty()) warp.spare.push_back(std::make_unique<Meeting>());
    warp.meetings.push_back(std::move(warp.spare.back()));
    warp.spare.pop_back();
    meeting = warp.meetings.back().get();
    meeting->kind = kind;
    meeting->mask = mask;
    meeting->arrived = 0;
    meeting->left = mask;
    meeting->ballot = 0;
    meeting->caller = caller;
    meeting->first_lane = lane;
  } else if (machine.launch_->checked && caller != meeting->caller) {
    machine.suspect("lanes of a warp meet at different operations",
                    machine.party(warp.threads[meeting->first_lane], meeting->caller), machine.party(thread, caller));
  }
  meeting->arrived |= bit;
  meeting->values[lane] = value;
  if (value != 0) meeting->ballot |= bit;
  if (meeting->arrived != mask) {
    machine.wait(thread, meeting, "lanes of its warp", caller);
  } else {
    if (machine.launch_->checked && kind == Collective::synchronise) machine.meet_warp(warp, mask);
    for (unsigned other = 32; other-- > 0;) {
      if ((mask & ~bit) >> other & 1) machine.make_next(warp.threads[other]);
    }
    machine.pass(thread);
  }
  unsigned long long result = meeting->ballot;
  if (kind == Collective::shuffle) {
    if (source >= 32 || (mask >> source & 1) == 0) {
      if (machine.launch_->checked) {
        machine.fail_here("divergent_barrier",
                          "a shuffle reads lane " + std::to_string(source) + ", which does not take part", caller);
      }
      source = lane;
    }
    result = meeting->values[source];
  }
  meeting->left &= ~bit;
  if (meeting->left == 0) {
    for (auto& candidate : warp.meetings) {
      if (candidate.get() != meeting) continue;
      warp.spare.push_back(std::move(candidate));
      candidate = std::move(warp.meetings.back());
      warp.meetings.pop_back();
      break;
    }
  }
  return result;
}

void Calls::cluster_arrive(bool releases, const void* caller) {
  Machine& machine = *Machine::current;
  Thread& thread = *machine.running_;
  Cluster& cluster = *thread.cta->cluster;
  if (thread.at_cluster_barrier) {
    machine.fail_here("divergent_barrier", "the thread arrives twice at the cluster's barrier without a wait", caller);
  }
  thread.at_cluster_barrier = true;
  thread.cluster_phase = cluster.phase;
  if (machine.launch_->checked) {
    // What a relaxed arrival tells of: barriers whose initialisation was fenced.
    for (uint64_t number : thread.initialised_barriers) cluster.pending.learn(key_of(Owner::barrier, number), 1);
    if (releases) {
      cluster.releases.push_back({&thread, thread.clock});
      cluster.pending.join(thread.own);
      cluster.pending.join(thread.cta->common);
      cluster.pending.learn(key_of(Owner::warp, thread.warp->number), thread.warp->below);
      cluster.pending.learn(key_of(Owner::cta, thread.cta->number), thread.cta->below);
      ++thread.clock;
    }
  }
  if (++cluster.arrived + cluster.finished == cluster.threads) machine.cluster_arrived(cluster);
}

void Calls::cluster_wait(const void* caller) {
  Machine& machine = *Machine::current;
  Thread& thread = *machine.running_;
  Cluster& cluster = *thread.cta->cluster;
  if (!thread.at_cluster_barrier) {
    machine.fail_here("divergent_barrier", "the thread waits at the cluster's barrier, where it has not arrived",
                      caller);
  }
  while (cluster.phase == thread.cluster_phase) machine.wait(thread, &cluster, "a barrier of its cluster", caller);
  thread.at_cluster_barrier = false;
  if (machine.launch_->checked) thread.own.join(cluster.released);
}

}  // namespace simulator
