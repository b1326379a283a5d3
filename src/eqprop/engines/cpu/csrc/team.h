/* A team of threads for one call, its barrier, and the division of work. */
#ifndef EQPROP_TEAM_H
#define EQPROP_TEAM_H

#include <pthread.h>
#include <sched.h>
#include <stdint.h>

typedef struct {
    int size;
    int open;            /* set once the size is known: the system may refuse threads */
    int arrived, round;  /* state of the barrier */
    pthread_mutex_t lock;
    pthread_cond_t released;
    int64_t next;        /* the next task for an idle thread */
} Team;

typedef struct {
    Team *team;
    int rank;
    void (*work)(Team *team, int rank, void *job);
    void *job;
} Member;

enum { SPINS = 1000 }; /* some tens of microseconds */

static inline void pause_briefly(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Wait for all threads: spin briefly, since the others are usually close, then sleep, since on a busy machine they may not
   be running at all. */
static void barrier(Team *team) {
    if (team->size == 1) return;
    const int round = __atomic_load_n(&team->round, __ATOMIC_RELAXED);
    if (__atomic_add_fetch(&team->arrived, 1, __ATOMIC_ACQ_REL) == team->size) {
        __atomic_store_n(&team->arrived, 0, __ATOMIC_RELAXED);
        pthread_mutex_lock(&team->lock);
        __atomic_store_n(&team->round, round + 1, __ATOMIC_RELEASE);
        pthread_cond_broadcast(&team->released);
        pthread_mutex_unlock(&team->lock);
        return;
    }
    for (int spins = 0; spins < SPINS; spins++) {
        if (__atomic_load_n(&team->round, __ATOMIC_ACQUIRE) != round) return;
        pause_briefly();
    }
    pthread_mutex_lock(&team->lock);
    while (__atomic_load_n(&team->round, __ATOMIC_ACQUIRE) == round) pthread_cond_wait(&team->released, &team->lock);
    pthread_mutex_unlock(&team->lock);
}

static void *enter(void *argument) {
    Member *member = argument;
    while (!__atomic_load_n(&member->team->open, __ATOMIC_ACQUIRE)) sched_yield();
    member->work(member->team, member->rank, member->job);
    return 0;
}

enum { MOST_THREADS = 256 };

/* Run work(team, rank, job) on `threads` threads including this one, or on as many as the system provides. */
static void run_team(int64_t threads, void (*work)(Team *, int, void *), void *job) {
    Team team = {.size = 1, .lock = PTHREAD_MUTEX_INITIALIZER, .released = PTHREAD_COND_INITIALIZER};
    pthread_t handles[MOST_THREADS];
    Member members[MOST_THREADS];
    members[0] = (Member){&team, 0, work, job};
    while (team.size < threads && team.size < MOST_THREADS) {
        members[team.size] = (Member){&team, team.size, work, job};
        if (pthread_create(&handles[team.size], 0, enter, &members[team.size]) != 0) break;
        team.size++;
    }
    __atomic_store_n(&team.open, 1, __ATOMIC_RELEASE);
    enter(&members[0]);
    for (int rank = 1; rank < team.size; rank++) pthread_join(handles[rank], 0);
}

static inline int64_t take(Team *team) { return __atomic_fetch_add(&team->next, 1, __ATOMIC_RELAXED); }

/* A rank's share of `count` pieces: [first, last). */
static inline void share(int64_t count, const Team *team, int rank, int64_t *first, int64_t *last) {
    *first = count * rank / team->size;
    *last = count * (rank + 1) / team->size;
}

#endif
