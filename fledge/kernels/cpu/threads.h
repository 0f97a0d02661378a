/* A thread pool for tasks of microseconds: idle threads spin for a while before they sleep. Each takes one large stretch of
   contiguous items, whose memory is read sequentially, and then small ones while there are any: a core that is busy with other work
   takes fewer. The caller is one of the threads. There is one caller at a time. */
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__)
#define PAUSE() __builtin_ia32_pause()
#else
#define PAUSE() ((void)0)
#endif

enum { MAX_THREADS = 256, SPINS = 20000 };  /* about 0.2 ms: longer than the host takes between two layers */
/* Eighths of the items that are in the large stretches. With four equal stretches per thread a pass took 4-5 % longer. */
enum { LARGE_EIGHTHS = 7 };

typedef void (*Work)(const void *task, long item);
typedef void (*After)(const void *task, long number, long threads);  /* called after each thread's large stretch */

/* Memory that this thread will read next, which it prefetches while it waits. `streamed`: only into the L1 cache. */
static __thread struct { const char *at, *end; int streamed; } expected;

static inline void wait_a_little(void) {
    if (expected.at >= expected.end) PAUSE();
    else if (expected.streamed) __builtin_prefetch(expected.at, 0, 0), expected.at += 64;
    else __builtin_prefetch(expected.at, 0, 2), expected.at += 64;
}

static struct {
    pthread_mutex_t caller, sleep;
    pthread_cond_t wake;
    int num_threads;       /* threads that were started, without the caller */
    atomic_int sleepers;
    atomic_ulong ticket;   /* round << 32 | stretches left to take: a new round means that there is work */
    atomic_long unfinished;/* stretches not done: the caller waits for these, not for threads that got no core */
    /* The current round's values; they do not change while any of its stretches is unfinished. */
    atomic_int helpers;    /* threads that take items */
    atomic_long num_items;
    atomic_long large, small;  /* items of each thread's first stretch, and of each later one */
    _Atomic(Work) work;
    _Atomic(const void *) task;
    _Atomic(After) after;  /* or NULL */
} pool = {.caller = PTHREAD_MUTEX_INITIALIZER, .sleep = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER};

#define READ(field) atomic_load_explicit(&pool.field, memory_order_relaxed)
#define WRITE(field, value) atomic_store_explicit(&pool.field, value, memory_order_relaxed)

static long num_stretches(long num_items, long large, long small, long threads) {
    return threads + (num_items - threads * large + small - 1) / small;
}

/* A stretch is taken by a compare-and-exchange of the whole ticket. It fails for a late thread whose round has ended; so the values
   that a thread read are used only if they all belong to the current round. */
static void take_items(void) {
    unsigned long ticket = atomic_load(&pool.ticket), left;
    while ((left = ticket & 0xffffffffUL)) {
        long num_items = READ(num_items), large = READ(large), small = READ(small), threads = READ(helpers) + 1;
        Work work = READ(work);
        const void *task = READ(task);
        After after = READ(after);
        if (!atomic_compare_exchange_weak(&pool.ticket, &ticket, ticket - 1)) continue;
        long number = num_stretches(num_items, large, small, threads) - (long)left, is_large = number < threads;
        long item = is_large ? number * large : threads * large + (number - threads) * small;
        long end = item + (is_large ? large : small);
        for (end = end < num_items ? end : num_items; item < end; item++) work(task, item);
        if (is_large && after) after(task, number, threads);
        atomic_fetch_sub_explicit(&pool.unfinished, 1, memory_order_release);
        ticket = atomic_load(&pool.ticket);
    }
}

static unsigned long current_round(void) { return atomic_load(&pool.ticket) >> 32; }

static void *helper(void *argument) {
    long index = (long)argument;
    unsigned long seen = 0;
    for (;;) {
        for (int spins = 0; current_round() == seen; spins++) {
            wait_a_little();
            if (spins < SPINS) continue;
            pthread_mutex_lock(&pool.sleep);
            atomic_fetch_add(&pool.sleepers, 1);
            while (current_round() == seen) pthread_cond_wait(&pool.wake, &pool.sleep);
            atomic_fetch_sub(&pool.sleepers, 1);
            pthread_mutex_unlock(&pool.sleep);
        }
        seen = current_round();
        if (index < READ(helpers)) take_items();
    }
    return NULL;
}

/* Called in a forked child: threads do not survive a fork, and the condition variable would still count those that slept. (Checking
   the process id in each round instead took 0.1 us: 40 us per pass of 30 layers.) */
static void forget_threads(void) {
    pool.caller = pool.sleep = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    pool.wake = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
    pool.num_threads = 0;
    atomic_store(&pool.sleepers, 0);
    atomic_store(&pool.ticket, 0);
}

__attribute__((constructor)) static void watch_forks(void) { pthread_atfork(NULL, NULL, forget_threads); }

static void start_threads(int wanted) {
    while (pool.num_threads < wanted && pool.num_threads < MAX_THREADS) {
        pthread_t thread;
        pthread_attr_t detached;
        pthread_attr_init(&detached);
        pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
        if (pthread_create(&thread, &detached, helper, (void *)(long)pool.num_threads)) return;
        pool.num_threads++;
    }
}

static long large_stretch(long num_items, long threads) {
    long share = num_items * LARGE_EIGHTHS / (8 * threads);
    return share > 1 ? share : 1;
}

/* Calls work(task, 0 … num_items - 1), each once, in any order; returns when all are done. `after`: or NULL. */
static void parallel_then(Work work, const void *task, After after, long num_items, int num_threads) {
    int helpers = num_threads - 1 < num_items - 1 ? num_threads - 1 : (int)num_items - 1;
    if (helpers > 0) start_threads(helpers);
    if (helpers > pool.num_threads) helpers = pool.num_threads;
    if (helpers <= 0) {
        for (long item = 0; item < num_items; item++) work(task, item);
        return;
    }
    long threads = helpers + 1, large = large_stretch(num_items, threads);
    long small = (num_items - threads * large + threads - 1) / threads;
    small = small > 1 ? small : 1;
    long stretches = num_stretches(num_items, large, small, threads);
    WRITE(work, work), WRITE(task, task), WRITE(after, after), WRITE(num_items, num_items), WRITE(helpers, helpers);
    WRITE(large, large), WRITE(small, small);
    WRITE(unfinished, stretches);
    atomic_store(&pool.ticket, (current_round() + 1) << 32 | stretches);
    if (atomic_load(&pool.sleepers)) {
        pthread_mutex_lock(&pool.sleep);
        pthread_cond_broadcast(&pool.wake);
        pthread_mutex_unlock(&pool.sleep);
    }
    take_items();
    for (long spins = 0; atomic_load_explicit(&pool.unfinished, memory_order_acquire); spins++)
        if (spins < SPINS) wait_a_little(); else sched_yield();
}

static void parallel(Work work, const void *task, long num_items, int num_threads) {
    parallel_then(work, task, NULL, num_items, num_threads);
}
