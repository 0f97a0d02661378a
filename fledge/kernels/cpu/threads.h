/* A pool of threads for work of microseconds: idle ones spin for a while before they sleep, items are taken a few at a time, so
   that a core that is busy elsewhere takes fewer. The caller is one of the threads. One caller at a time. */
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#if defined(__x86_64__)
#define PAUSE() __builtin_ia32_pause()
#else
#define PAUSE() ((void)0)
#endif

enum { MAX_THREADS = 256, SPINS = 20000, STRETCHES = 4 };  /* about 0.2 ms: longer than the host takes between two layers */

typedef void (*Work)(const void *task, long item);

static struct {
    pthread_mutex_t caller, sleep;
    pthread_cond_t wake;
    pid_t owner;           /* threads do not survive a fork */
    int num_threads;       /* started, besides the caller */
    atomic_int sleepers;
    atomic_long round;     /* a new value: there is work */
    atomic_long next;      /* item to take */
    long stretch;          /* items taken at a time: neighbours, for their memory is read in one go */
    atomic_int working;    /* threads that have not seen the round through; all of them, for they read what follows */
    int helpers;           /* threads that take items */
    Work work;
    const void *task;
    long num_items;
} pool = {.caller = PTHREAD_MUTEX_INITIALIZER, .sleep = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER};

static void take_items(void) {
    long item, stretch = pool.stretch, num_items = pool.num_items;
    while ((item = atomic_fetch_add_explicit(&pool.next, stretch, memory_order_relaxed)) < num_items)
        for (long end = item + stretch < num_items ? item + stretch : num_items; item < end; item++) pool.work(pool.task, item);
}

static void *helper(void *argument) {
    long index = (long)argument, seen = 0;
    for (;;) {
        for (int spins = 0; atomic_load_explicit(&pool.round, memory_order_acquire) == seen; spins++) {
            PAUSE();
            if (spins < SPINS) continue;
            pthread_mutex_lock(&pool.sleep);
            atomic_fetch_add(&pool.sleepers, 1);
            while (atomic_load(&pool.round) == seen) pthread_cond_wait(&pool.wake, &pool.sleep);
            atomic_fetch_sub(&pool.sleepers, 1);
            pthread_mutex_unlock(&pool.sleep);
        }
        seen = atomic_load_explicit(&pool.round, memory_order_acquire);
        if (index < pool.helpers) take_items();
        atomic_fetch_sub_explicit(&pool.working, 1, memory_order_release);
    }
    return NULL;
}

static void start_threads(int wanted) {
    if (pool.owner != getpid()) {
        pool.owner = getpid();
        pool.num_threads = 0;
        atomic_store(&pool.sleepers, 0);
        atomic_store(&pool.round, 0);
    }
    while (pool.num_threads < wanted && pool.num_threads < MAX_THREADS) {
        pthread_t thread;
        pthread_attr_t detached;
        pthread_attr_init(&detached);
        pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
        if (pthread_create(&thread, &detached, helper, (void *)(long)pool.num_threads)) return;
        pool.num_threads++;
    }
}

/* work(task, 0 … num_items - 1), each once, in any order; returns when all are done. */
static void parallel(Work work, const void *task, long num_items, int num_threads) {
    int helpers = num_threads - 1 < num_items - 1 ? num_threads - 1 : (int)num_items - 1;
    if (helpers > 0) start_threads(helpers);
    if (helpers > pool.num_threads) helpers = pool.num_threads;
    if (helpers <= 0) {
        for (long item = 0; item < num_items; item++) work(task, item);
        return;
    }
    pool.work = work, pool.task = task, pool.num_items = num_items, pool.helpers = helpers;
    pool.stretch = (num_items + STRETCHES * (helpers + 1) - 1) / (STRETCHES * (helpers + 1));
    atomic_store_explicit(&pool.next, 0, memory_order_relaxed);
    atomic_store_explicit(&pool.working, pool.num_threads, memory_order_relaxed);
    atomic_fetch_add(&pool.round, 1);
    if (atomic_load(&pool.sleepers)) {
        pthread_mutex_lock(&pool.sleep);
        pthread_cond_broadcast(&pool.wake);
        pthread_mutex_unlock(&pool.sleep);
    }
    take_items();
    for (long spins = 0; atomic_load_explicit(&pool.working, memory_order_acquire); spins++)
        if (spins < SPINS) PAUSE(); else sched_yield();
}
